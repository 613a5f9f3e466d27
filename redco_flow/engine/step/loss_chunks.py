"""The split of a chunked loss over a mesh: of its tokens, and of the head's vocabulary.

Dims are those of `chunked_loss`: B batch, T sequence, D model, V vocabulary, C chunks, N shards of
the batch, F of them that share a head, X of the sequence, b and t rows and tokens of one shard's
chunk.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from redco_flow.engine.sharding.mesh import CONTEXT_AXIS, DATA_AXIS, FSDP_AXIS, MODEL_AXIS


@dataclass(frozen=True)
class TokenSplit:
    """The split of labels (B, T) over the mesh.

    Args:
        batch_axes, sequence_axes: what splits B and T.
        num_rows, num_sequences: N and X.
        rows, length: of one shard.
        num_sharing: F; 1 where each shard scores its own tokens.
    """

    batch_axes: tuple[str, ...]
    sequence_axes: tuple[str, ...]
    num_rows: int
    num_sequences: int
    rows: int
    length: int
    num_sharing: int = 1

    @classmethod
    def of(cls, shape: tuple[int, ...], sizes: dict[str, int]) -> TokenSplit:
        """Cut (B, T) by the sizes of the mesh's axes; not along a dim that they do not divide."""
        batch_axes, num_rows = _dividing(shape[0], sizes, DATA_AXIS, FSDP_AXIS)
        sequence_axes, num_sequences = _dividing(shape[1], sizes, CONTEXT_AXIS)
        rows, length = shape[0] // num_rows, shape[1] // num_sequences
        return cls(batch_axes, sequence_axes, num_rows, num_sequences, rows, length)

    @property
    def tokens_per_shard(self) -> int:
        """Tokens of one shard, of all chunks."""
        return self.rows * self.length

    def chunks(self, x: jax.Array, num_chunks: int, fill: int = 0) -> jax.Array:
        """View (B, T, …) as (C, N, X, b, t, …); what fills up the last chunk is `fill`."""
        trailing = x.shape[2:]
        x = x.reshape(self.num_rows, self.rows, self.num_sequences, self.length, *trailing)
        size = math.ceil(self.length / num_chunks)
        missing = num_chunks * size - self.length
        widths = [(0, 0)] * 3 + [(0, missing)] + [(0, 0)] * len(trailing)
        x = jnp.pad(x, widths, constant_values=fill)
        x = x.reshape(*x.shape[:3], num_chunks, size, *trailing)
        return self.placed(jnp.moveaxis(x, (3, 0, 2), (0, 1, 2)), 1)

    def joined(self, chunks: jax.Array) -> jax.Array:
        """View (C, N, X, b, t, …) as (B, T, …) again."""
        trailing = chunks.shape[5:]
        x = jnp.moveaxis(chunks, (0, 1, 2), (3, 0, 2))
        x = x.reshape(*x.shape[:3], -1, *trailing)[:, :, :, : self.length]
        return x.reshape(self.num_rows * self.rows, self.num_sequences * self.length, *trailing)

    def placed(self, x: jax.Array, dim: int = 0) -> jax.Array:
        """Lay dims N and X, from `dim` on, over the axes that split them."""
        return self._placed(x, self.batch_axes, [None] * dim)

    def gathered(self, chunk: jax.Array) -> jax.Array:
        """View (N, X, b, t, …) as (N / F, X, F b, t, …), on each of the shards that share."""
        if self.num_sharing == 1:
            return chunk
        parts = chunk.reshape(-1, self.num_sharing, *chunk.shape[1:])
        parts = jnp.moveaxis(parts, 1, 2)
        parts = parts.reshape(*parts.shape[:2], -1, *parts.shape[4:])
        return self._placed(parts, self._shared_axes, [], [None])

    def scattered(self, shared: jax.Array) -> jax.Array:
        """View (N / F, X, F b, t, …) as (N, X, b, t, …) again, on the shard of each."""
        if self.num_sharing == 1:
            return shared
        parts = shared.reshape(*shared.shape[:2], self.num_sharing, -1, *shared.shape[3:])
        parts = jnp.moveaxis(parts, 2, 1)
        return self.placed(parts.reshape(-1, *parts.shape[2:]))

    def gathered_rows(self, x: jax.Array) -> jax.Array:
        """Lay (B, T, …) out so that shards that share have each other's rows too."""
        if self.num_sharing == 1:
            return x
        # The first is for the gradient, which each shard needs for its rows alone.
        return self._placed(self.placed(x), self._shared_axes)

    def placed_sum(self, x: jax.Array, dims: Sequence[Any]) -> jax.Array:
        """Lay out a sum (N / F, X, …) of gradients, its further dims by `dims`."""
        return self._placed(x, self._shared_axes, [], dims)

    @property
    def _shared_axes(self) -> tuple[str, ...]:
        """Name the axes that split the batch between those that share."""
        if self.num_sharing == 1:
            return self.batch_axes
        return tuple(axis for axis in self.batch_axes if axis != FSDP_AXIS)

    def _placed(
        self,
        x: jax.Array,
        batch_axes: tuple[str, ...],
        before: Sequence[None] = (),
        after: Sequence[Any] = (),
    ) -> jax.Array:
        free = [PartitionSpec.UNCONSTRAINED] * (x.ndim - len(before) - 2 - len(after))
        spec = PartitionSpec(*before, batch_axes, self.sequence_axes, *after, *free)
        placed: jax.Array = jax.lax.with_sharding_constraint(x, spec)
        return placed


@dataclass(frozen=True)
class HeadSplit:
    """The split of the vocabulary while losses are computed.

    Args:
        axes: of the mesh, the major one first; empty: as the head's own layout says.
        vocab_size: V.
    """

    axes: tuple[str, ...] = ()
    vocab_size: int = 0

    @classmethod
    def of(
        cls, cut: TokenSplit, sizes: Mapping[str, int], head: Any, vocab_size: int, width: int
    ) -> HeadSplit:
        """Let the devices along `fsdp` share the head where that sends less.

        Either the head is gathered twice and its gradient reduced, or the tokens' hidden states
        are, and the head is laid out by vocabulary. Kernels without that dim would be multiplied
        by every token on every device.

        Args:
            sizes: of the mesh's axes.
            width: D.
        """
        axes = tuple(axis for axis in (MODEL_AXIS, FSDP_AXIS) if sizes.get(axis, 1) > 1)
        divides = vocab_size % math.prod(sizes[axis] for axis in axes) == 0
        kernels = [x for x in jax.tree.leaves(head) if x.ndim > 1]
        if FSDP_AXIS not in cut.batch_axes or not divides or not kernels:
            return cls()
        if any(vocab_size not in kernel.shape for kernel in kernels):
            return cls()
        count = sizes[FSDP_AXIS]
        gathered = count * cut.tokens_per_shard * width
        spared = (1 - 1 / count) * _size(head) / sizes.get(MODEL_AXIS, 1)
        return cls(axes, vocab_size) if gathered < spared else cls()

    def split(self, head: Any) -> Any:
        """Split every array of a head along its vocabulary."""
        return jax.tree.map(self.placed, head) if self.axes else head

    def placed(self, x: jax.Array) -> jax.Array:
        """Split one array of a head."""
        placed: jax.Array = jax.lax.with_sharding_constraint(x, PartitionSpec(*self.dims(x)))
        return placed

    def dims(self, x: jax.Array) -> list[Any]:
        """Return what splits each dim of an array of the head."""
        free = PartitionSpec.UNCONSTRAINED
        if not self.axes:
            return [free] * x.ndim
        places = [place for place, size in enumerate(x.shape) if size == self.vocab_size]
        return [self.axes if place in places[-1:] else None for place in range(x.ndim)]


def _size(head: Any) -> int:
    return sum(x.size for x in jax.tree.leaves(head))


def _dividing(size: int, sizes: dict[str, int], *axes: str) -> tuple[tuple[str, ...], int]:
    present = tuple(axis for axis in axes if sizes.get(axis, 1) > 1)
    number = math.prod(sizes[axis] for axis in present)
    return (present, number) if size % number == 0 else ((), 1)
