"""Frozen kernels in 8 or 4 bits: how they are stored, and made wide where they are used.

Sources: Dettmers et al. 2022, LLM.int8(), section 2.1: 8 bits with a scale for each output.
Dettmers et al. 2023, QLoRA, section 3 and appendix E: 4 bits, one of 16 levels that normally
distributed weights reach equally often, times the largest weight of a block; differs: a block's
scale is float32 and not quantized again, and blocks lie along one input dim.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

BaseDtype = Literal["int8", "nf4"]

_LARGEST = 127  # of 8 bits, the same on both sides of zero
_BLOCK = 64
NF4_LEVELS = np.asarray(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ],
    np.float32,
)


class Quantization(ABC):
    """The storage format of one kernel."""

    @abstractmethod
    def store(self, kernel: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return a kernel as it is stored, and its scales, float32."""

    @abstractmethod
    def widen(self, stored: jax.Array, scales: jax.Array) -> jax.Array:
        """Return the kernel, float32, rounded."""

    @abstractmethod
    def row(self) -> Quantization:
        """Return how one entry along the first dim is stored."""


@dataclass(frozen=True)
class EachOutput(Quantization):
    """8 bits, and a scale for each output, without the kernel's inputs, which stand at `inputs`.

    No weight is off by more than half of its output's scale, 1/254 of the largest weight there.
    """

    inputs: tuple[int, ...]

    def store(self, kernel: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Round a kernel."""
        wide = kernel.astype(jnp.float32)
        scales = jnp.max(jnp.abs(wide), axis=self.inputs) / _LARGEST
        steps = wide / jnp.expand_dims(_not_zero(scales), self.inputs)
        return jnp.round(steps).astype(jnp.int8), scales

    def widen(self, stored: jax.Array, scales: jax.Array) -> jax.Array:
        """Multiply by the scales."""
        return stored.astype(jnp.float32) * jnp.expand_dims(scales, self.inputs)

    def row(self) -> Quantization:
        """See the base class."""
        return EachOutput(tuple(position - 1 for position in self.inputs))


@dataclass(frozen=True)
class Blocks(Quantization):
    """4 bits, two weights in a byte, and a scale for each block of at most 64 along one input dim.

    The scales have the kernel's dims, with a number of blocks in that dim's place. No weight is
    off by more than 0.152 of its block's largest weight: half of the widest gap of two levels.

    Args:
        position: of the input dim that is cut into blocks.
        size: of that dim.
    """

    position: int
    size: int

    @property
    def _block(self) -> int:
        return min(_BLOCK, self.size + self.size % 2)

    def store(self, kernel: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Round a kernel."""
        padding = [(0, 0)] * kernel.ndim
        padding[self.position] = (0, -self.size % self._block)
        wide = self._cut(jnp.pad(kernel.astype(jnp.float32), padding), self._block)
        scales = jnp.max(jnp.abs(wide), axis=self.position + 1)
        between = (NF4_LEVELS[1:] + NF4_LEVELS[:-1]) / 2
        steps = wide / jnp.expand_dims(_not_zero(scales), self.position + 1)
        codes = self._joined(jnp.searchsorted(between, steps).astype(jnp.uint8))
        first, second = jnp.moveaxis(self._cut(codes, 2), self.position + 1, 0)
        return first | (second << 4), scales

    def widen(self, stored: jax.Array, scales: jax.Array) -> jax.Array:
        """Multiply by the scales."""
        codes = self._joined(jnp.stack([stored & 15, stored >> 4], axis=self.position + 1))
        wide = self._cut(jnp.asarray(NF4_LEVELS)[codes], self._block)
        wide = self._joined(wide * jnp.expand_dims(scales, self.position + 1))
        return jax.lax.slice_in_dim(wide, 0, self.size, axis=self.position)

    def row(self) -> Quantization:
        """See the base class."""
        return replace(self, position=self.position - 1)

    def _cut(self, values: jax.Array, length: int) -> jax.Array:
        """Cut the dim into pieces of a length, which becomes a dim after it."""
        before, after = values.shape[: self.position], values.shape[self.position + 1 :]
        return values.reshape(*before, -1, length, *after)

    def _joined(self, values: jax.Array) -> jax.Array:
        before, after = values.shape[: self.position], values.shape[self.position + 2 :]
        return values.reshape(*before, -1, *after)


def _not_zero(scales: jax.Array) -> jax.Array:
    return jnp.where(scales == 0, 1, scales)
