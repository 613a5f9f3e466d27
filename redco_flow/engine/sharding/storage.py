"""Store arrays padded where the shards do not divide them, and fused parts sorted by shard.

A table of 50257 rows over 4 shards lies on the devices as 50260, which is how XLA splits 50257 rows
by itself, so cutting the padding off inside a compiled function moves nothing. The padding never
meets a loss, a gradient or an optimizer. Fused parts keep their order by shard there
(`fused_use.py`), for sorting moves them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from redco_flow.engine.sharding.fused_parts import FusedParts
from redco_flow.engine.sharding.mesh import (
    CONTEXT_AXIS,
    FSDP_AXIS,
    MODEL_AXIS,
    parameter_axis_sizes,
)
from redco_flow.engine.sharding.rules import mesh_axes, stored_shape


@dataclass(frozen=True)
class PaddedStorage:
    """The padded storage layout of a tree of arrays on a mesh.

    Args:
        shapes: the tree's exact shapes.
        specs: a PartitionSpec per leaf, as it is stored.
        fused: per leaf the dim that is stored sorted by shard, or None.
        over_context: whether what is split over `fsdp` is split over `context` too.
    """

    mesh: Mesh
    shapes: Any
    specs: Any
    fused: Any
    over_context: bool = False

    def __getitem__(self, key: str) -> PaddedStorage:
        """Return the storage of a part of the tree."""
        return replace(self, shapes=self.shapes[key], specs=self.specs[key], fused=self.fused[key])

    @property
    def is_exact(self) -> bool:
        """Whether `to_logical` and `to_storage` return what they are given."""
        return not self._is_padded and not any(self.fused_leaves)

    @property
    def fused_leaves(self) -> list[FusedParts | None]:
        """One entry of `fused` per leaf of the tree."""
        structure: Any = jax.tree.structure(self.shapes)
        leaves: list[FusedParts | None] = structure.flatten_up_to(self.fused)
        return leaves

    @property
    def split_leaves(self) -> list[FusedParts | None]:
        """One per leaf: its parts along the dim that is split over `model`; one without fused ones.

        None where no dim is, or its shards are padded.
        """
        structure: Any = jax.tree.structure(self.shapes)
        leaves = zip(
            jax.tree.leaves(self.shapes),
            structure.flatten_up_to(self.specs),
            self.fused_leaves,
            strict=True,
        )
        num_shards = self._axis_sizes[MODEL_AXIS]
        return [fused or _whole_part(x.shape, spec, num_shards) for x, spec, fused in leaves]

    @property
    def stored_sharding(self) -> Any:
        """The tree of shardings of the padded arrays."""
        return self._map(lambda _, spec: self._sharding(spec))

    @property
    def exact_sharding(self) -> Any:
        """The tree of shardings of the exact arrays, as they can lie outside compiled functions.

        What is padded is split along another dim there, or replicated where no other divides.
        """
        return self._map(
            lambda shape, spec: self._sharding(exact_spec(shape.shape, spec, self._axis_sizes))
        )

    @property
    def abstract_stored(self) -> Any:
        """Shapes and shardings of the padded arrays."""
        return jax.tree.map(
            _abstract, jax.eval_shape(self.to_storage, self.shapes), self.stored_sharding
        )

    @property
    def abstract_exact(self) -> Any:
        """Shapes and shardings of the exact arrays; see `exact_sharding`."""
        return jax.tree.map(_abstract, self.shapes, self.exact_sharding)

    def to_logical(self, stored: Any) -> Any:
        """Make stored arrays exact; to be traced into a compiled function."""
        return self._sort(FusedParts.to_logical, self.unpad(stored))

    def to_storage(self, exact: Any) -> Any:
        """Make exact arrays what is stored; to be traced into a compiled function."""
        return self.pad(self._sort(FusedParts.to_storage, exact))

    def unpad(self, stored: Any) -> Any:
        """Cut the padding off, as compiled steps do; what is sorted by shard stays so."""

        def cut(shape: Any, spec: PartitionSpec, array: jax.Array) -> jax.Array:
            if array.shape == tuple(shape.shape):
                return array
            exact = array[tuple(slice(size) for size in shape.shape)]
            placed: jax.Array = jax.lax.with_sharding_constraint(exact, self._sharding(spec))
            return placed

        return self._map(cut, stored) if self._is_padded else stored

    def pad(self, exact: Any) -> Any:
        """Undo `unpad`, with zeros."""

        def pad(shape: Any, spec: PartitionSpec, array: jax.Array) -> jax.Array:
            wanted = self._stored(shape, spec)
            if array.shape == wanted:
                return array
            widths = [(0, after - now) for now, after in zip(array.shape, wanted, strict=True)]
            return jnp.pad(array, widths)

        return self._map(pad, exact) if self._is_padded else exact

    @property
    def _is_padded(self) -> bool:
        padded = self._map(lambda shape, spec: self._stored(shape, spec) != tuple(shape.shape))
        return any(jax.tree.leaves(padded))

    def _sort(self, sort: Callable[[FusedParts, jax.Array], jax.Array], tree: Any) -> Any:
        leaves, structure = jax.tree.flatten(tree)
        found = [
            leaf if fused is None else sort(fused, leaf)
            for leaf, fused in zip(leaves, self.fused_leaves, strict=True)
        ]
        return jax.tree.unflatten(structure, found)

    def _stored(self, shape: Any, spec: PartitionSpec) -> tuple[int, ...]:
        return stored_shape(tuple(shape.shape), spec, self._axis_sizes)

    @property
    def _axis_sizes(self) -> dict[str, int]:
        return parameter_axis_sizes(dict(self.mesh.shape), over_context=self.over_context)

    def _sharding(self, spec: PartitionSpec) -> NamedSharding:
        """Return how an array with a spec of the rules lies on the mesh."""
        if self.over_context:
            both = (FSDP_AXIS, CONTEXT_AXIS)
            spec = PartitionSpec(*(both if axis == FSDP_AXIS else axis for axis in spec))
        return NamedSharding(self.mesh, spec)

    def _map(self, function: Callable[..., Any], *trees: Any) -> Any:
        return jax.tree.map(function, self.shapes, self.specs, *trees)


def _abstract(shape: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)


def _whole_part(shape: tuple[int, ...], spec: PartitionSpec, num_shards: int) -> FusedParts | None:
    """Return the dim that is split over `model`, as one part."""
    position = tuple(spec).index(MODEL_AXIS) if MODEL_AXIS in spec else None
    if position is None or num_shards == 1 or shape[position] % num_shards:
        return None
    return FusedParts(position, (shape[position],), num_shards)


def exact_spec(
    shape: tuple[int, ...], spec: PartitionSpec, axis_sizes: Mapping[str, int]
) -> PartitionSpec:
    """Move the axes of dims that they do not divide to other dims, or drop them."""
    axes = list(spec) + [None] * (len(shape) - len(spec))
    for position, axis in enumerate(axes):
        if axis is None or shape[position] % axis_sizes[axis] == 0:
            continue
        axes[position] = None
        free = [i for i, other in enumerate(axes) if other is None and i != position]
        divided = [i for i in free if shape[i] % axis_sizes[axis] == 0]
        if divided:
            axes[max(divided, key=lambda i: shape[i])] = axis
    return PartitionSpec(*axes) if mesh_axes(PartitionSpec(*axes)) else PartitionSpec()
