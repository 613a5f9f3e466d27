"""How one parameter of ours is made of a checkpoint's tensors, written as a pattern.

    TensorLayout("layer model part heads head_dim", "(heads head_dim) model",
                 "encoder.block.{layer}.layer.0.SelfAttention.{part}.weight",
                 {"part": ("q", "k", "v")})

says that a parameter with those five dims is a stack, over layers and over q, k, v, of tensors
with two dims, the first of which is heads times head dim. Any block of the parameter can be
read from just the tensors, and the parts of them, that it covers. Refuses to know files.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

Shape = tuple[int, ...]
# Reads a block, given a slice per dim, of the tensor of that name.
ReadTensor = Callable[[str, tuple[slice, ...]], np.ndarray]


@dataclass(frozen=True)
class TensorLayout:
    """One parameter's dims, its tensors' dims, and the tensors' names.

    Args:
        parameter: names of the parameter's dims.
        tensor: the same for each tensor; dims in parentheses are flattened into one.
        name: the tensors' name; `{dim}` stands for a dim that is stacked.
        labels: what a stacked dim's indices are called in the name; numbers where not given.
        aliases: other names under which the same tensor is published; tied weights have many.
    """

    parameter: str
    tensor: str
    name: str
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    aliases: tuple[str, ...] = ()

    @property
    def dims(self) -> list[str]:
        """Names of the parameter's dims."""
        return self.parameter.split()

    @property
    def stacked(self) -> list[str]:
        """Those of them that count tensors."""
        return [dim for dim in self.dims if f"{{{dim}}}" in self.name]

    @property
    def tensor_dims(self) -> list[list[str]]:
        """Names of the dims behind each of a tensor's dims."""
        groups = re.findall(r"\(([^)]*)\)|(\S+)", self.tensor)
        return [(grouped or single).split() for grouped, single in groups]

    def tensor_shape(self, shape: Shape) -> Shape:
        """Return the shape of each tensor of a parameter of this shape."""
        sizes = self._sizes(shape)
        return tuple(math.prod(sizes[dim] for dim in group) for group in self.tensor_dims)

    def tensor_names(self, shape: Shape) -> Iterator[tuple[tuple[int, ...], str]]:
        """Yield (index along the stacked dims, name) of every tensor."""
        sizes = self._sizes(shape)
        for index in itertools.product(*(range(sizes[dim]) for dim in self.stacked)):
            yield index, self._name(index)

    def read_block(self, shape: Shape, block: tuple[slice, ...], read: ReadTensor) -> np.ndarray:
        """Assemble a block of the parameter from the tensors that it covers.

        Args:
            shape: the whole parameter's.
            block: a slice of step 1 per dim.
        """
        sizes = self._sizes(shape)
        bounds = {
            dim: range(*part.indices(sizes[dim]))
            for dim, part in zip(self.dims, block, strict=True)
        }
        parts = [
            self._read_one(self._name(index), sizes, bounds, read)
            for index in itertools.product(*(bounds[dim] for dim in self.stacked))
        ]
        stacked_shape = [len(bounds[dim]) for dim in self.stacked]
        whole = (
            np.stack(parts).reshape(*stacked_shape, *parts[0].shape) if self.stacked else parts[0]
        )
        order = self.stacked + self._flat_dims
        return whole.transpose([order.index(dim) for dim in self.dims])

    def split(self, parameter: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
        """Yield (name, tensor) of every tensor of a parameter; contiguous copies, one at a time."""
        shape = self.tensor_shape(parameter.shape)
        order = self.stacked + self._flat_dims
        ordered = parameter.transpose([self.dims.index(dim) for dim in order])
        for index, name in self.tensor_names(parameter.shape):
            yield name, np.ascontiguousarray(ordered[index]).reshape(shape)

    @property
    def _flat_dims(self) -> list[str]:
        return [dim for group in self.tensor_dims for dim in group]

    def _sizes(self, shape: Shape) -> dict[str, int]:
        return dict(zip(self.dims, shape, strict=True))

    def _name(self, index: tuple[int, ...]) -> str:
        labels = {
            dim: self.labels[dim][i] if dim in self.labels else str(i)
            for dim, i in zip(self.stacked, index, strict=True)
        }
        return self.name.format(**labels)

    def _read_one(
        self, name: str, sizes: Mapping[str, int], bounds: Mapping[str, range], read: ReadTensor
    ) -> np.ndarray:
        """Read one tensor's part, with its dims unflattened."""
        parts, unflattened, kept = [], [], []
        for group in self.tensor_dims:
            # Of flattened dims a run along the first is read, and the others are cut after it.
            outer, inner = group[0], math.prod(sizes[dim] for dim in group[1:])
            parts.append(slice(bounds[outer].start * inner, bounds[outer].stop * inner))
            unflattened += [len(bounds[outer]), *(sizes[dim] for dim in group[1:])]
            kept += [slice(None), *(_as_slice(bounds[dim]) for dim in group[1:])]
        return read(name, tuple(parts)).reshape(unflattened)[tuple(kept)]


def _as_slice(bounds: range) -> slice:
    return slice(bounds.start, bounds.stop)
