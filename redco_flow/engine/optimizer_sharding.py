"""Shard optimizer state as the parameters it belongs to.

Any optax state keeps per-parameter arrays in trees shaped like the parameters, so the end of a
leaf's path names its parameter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
from jax.sharding import PartitionSpec

from redco_flow.engine.fused_parts import FusedParts
from redco_flow.engine.parameter_paths import Path, key_names, named_leaves

Owner = TypeVar("Owner")
Shape = tuple[int, ...]


@dataclass(frozen=True)
class _Owner:
    """The parameter that a state leaf belongs to."""

    shape: Shape
    spec: PartitionSpec


def optimizer_specs(opt_state: Any, params: Any, param_specs: Any) -> Any:
    """Return the tree of PartitionSpecs of an optimizer state.

    A leaf of its parameter's shape gets the parameter's spec; one that lacks some of its dims
    (Adafactor's row and column means) gets what is left of it; all others (counters,
    placeholders) are replicated.

    Args:
        opt_state: arrays or shapes.
        params: arrays or shapes.
        param_specs: a PartitionSpec per parameter, in a tree like `params`.
    """
    specs = jax.tree.leaves(param_specs, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec))
    owners = {
        path: _Owner(tuple(leaf.shape), spec)
        for (path, leaf), spec in zip(named_leaves(params), specs, strict=True)
    }

    def find(key_path: tuple[Any, ...], leaf: Any) -> PartitionSpec:
        owner = _find_owner(key_names(key_path), owners)
        return PartitionSpec() if owner is None else _leaf_spec(tuple(leaf.shape), owner)

    return jax.tree_util.tree_map_with_path(find, opt_state)


def optimizer_fused(opt_state: Any, params: Any, param_fused: Any) -> Any | None:
    """Return, in a tree like an optimizer state, which dim of each array is sorted by shard.

    Args:
        opt_state, params: arrays or shapes.
        param_fused: per parameter its FusedParts or None, in a tree like `params`.

    Returns:
        None where an array of a fused parameter is neither of its shape nor plainly a mean along
        one dim, so that what became of its columns is not known.
    """
    structure: Any = jax.tree.structure(params)
    given: list[FusedParts | None] = structure.flatten_up_to(param_fused)
    owners = {
        path: (tuple(leaf.shape), fused)
        for (path, leaf), fused in zip(named_leaves(params), given, strict=True)
    }
    unknown = []

    def find(key_path: tuple[Any, ...], leaf: Any) -> FusedParts | None:
        path, shape = key_names(key_path), tuple(map(int, leaf.shape))
        whole, fused = _find_owner(path, owners) or ((), None)
        if fused is None or shape == whole or math.prod(shape) == 1:
            return fused if shape == whole else None
        places = [place for place in range(len(whole)) if _without(whole, place) == shape]
        if not places or whole.count(fused.size) > 1:
            unknown.append(path)
        if not places or fused.place in places:
            return None
        return fused.at(fused.place - (places[0] < fused.place))

    found = jax.tree_util.tree_map_with_path(find, opt_state)
    return None if unknown else found


def _find_owner(path: Path, owners: Mapping[Path, Owner]) -> Owner | None:
    """Return the parameter with the longest path that ends `path`."""
    for start in range(len(path) + 1):
        if path[start:] in owners:
            return owners[path[start:]]
    return None


def _leaf_spec(shape: Shape, owner: _Owner) -> PartitionSpec:
    if shape == owner.shape:
        return owner.spec
    axes = tuple(owner.spec) + (None,) * (len(owner.shape) - len(owner.spec))
    missing = len(owner.shape) - len(shape)
    if not shape or missing != 1:
        return PartitionSpec()
    found = {
        axes[:dim] + axes[dim + 1 :]
        for dim in range(len(owner.shape))
        if _without(owner.shape, dim) == shape
    }
    # Equal dims leave open which one was averaged away; such a leaf is one row or column.
    return PartitionSpec(*found.pop()) if len(found) == 1 else PartitionSpec()


def _without(shape: Shape, place: int) -> Shape:
    return shape[:place] + shape[place + 1 :]
