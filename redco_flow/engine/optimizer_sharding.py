"""Shard optimizer state as the parameters it belongs to.

Any optax state keeps per-parameter arrays in trees shaped like the parameters, so the end of a
leaf's path names its parameter. Knows shapes and paths; refuses to know which optimizer it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import PartitionSpec

from redco_flow.engine.parameter_paths import Path, key_names, named_leaves

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


def _find_owner(path: Path, owners: Mapping[Path, _Owner]) -> _Owner | None:
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
        if owner.shape[:dim] + owner.shape[dim + 1 :] == shape
    }
    # Equal dims leave open which one was averaged away; such a leaf is one row or column.
    return PartitionSpec(*found.pop()) if len(found) == 1 else PartitionSpec()
