"""Shapes and PartitionSpecs of the training state before the first step.

The optimizer's arrays are sharded like the parameters they belong to.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

from redco_flow.engine.sharding.fused_parts import FusedParts
from redco_flow.engine.sharding.rules import (
    Path,
    ShardingRules,
    key_names,
    mesh_axes,
    named_leaves,
    stored_shape,
)
from redco_flow.engine.step.step import State, counting_skipped, initial_state

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
        positions = [
            position for position in range(len(whole)) if _without(whole, position) == shape
        ]
        if not positions or whole.count(fused.size) > 1:
            unknown.append(path)
        if not positions or fused.position in positions:
            return None
        return fused.at(fused.position - (positions[0] < fused.position))

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


def _without(shape: Shape, position: int) -> Shape:
    return shape[:position] + shape[position + 1 :]


logger = logging.getLogger(__name__)


def start_state(
    params: Any,
    optimizer: optax.GradientTransformation,
    seed: int,
    *,
    counts_skipped: bool = False,
    trainable: Any = None,
    param_dtype: str = "float32",
) -> State:
    """Return the state before the first step; the optimizer's arrays are float32 or wider.

    Args:
        trainable: a tree of bools; None: all parameters.
        param_dtype: of what is trained; float32 leaves what is wider as it is.
    """
    mask = jax.tree.map(lambda _: True, params) if trainable is None else trainable
    own = jax.tree.map(lambda on, param: widen(param) if on else param, mask, params)
    state = initial_state(own, optimizer, seed)
    if param_dtype != "float32":
        state["params"] = jax.tree.map(
            lambda on, param: _narrowed(param, param_dtype) if on else param, mask, own
        )
    return counting_skipped(state) if counts_skipped else state


def state_layout(
    params: Any,
    optimizer: optax.GradientTransformation,
    rules: ShardingRules,
    *,
    counts_skipped: bool = False,
    trainable: Any = None,
    param_dtype: str = "float32",
) -> tuple[Any, Any]:
    """Return the state's tree of shapes and its tree of PartitionSpecs.

    Args:
        params: arrays or shapes.
    """
    start = partial(
        start_state, counts_skipped=counts_skipped, trainable=trainable, param_dtype=param_dtype
    )
    shapes = jax.eval_shape(lambda params: start(params, optimizer, 0), params)
    params_specs = rules.specs(shapes["params"])
    specs = dict.fromkeys(shapes, PartitionSpec()) | {
        "params": params_specs,
        "opt_state": optimizer_specs(shapes["opt_state"], shapes["params"], params_specs),
    }
    return shapes, specs


def fused_layout(shapes: Any, rules: ShardingRules) -> Any:
    """Return, in a tree like the state, which dim of each array is stored sorted by shard, if any.

    Args:
        shapes: the state's, see `state_layout`.
    """
    nothing = jax.tree.map(lambda _: None, shapes)
    params_fused = rules.fused(shapes["params"])
    state_fused = optimizer_fused(shapes["opt_state"], shapes["params"], params_fused)
    if state_fused is None:
        logger.warning(
            "the optimizer keeps arrays that are neither of their parameter's shape nor plainly a "
            "mean along one dim: fused kernels stay as they are, and activations move between "
            "shards."
        )
        return nothing
    return {**nothing, "params": params_fused, "opt_state": state_fused}


def bytes_per_device(shapes: Any, specs: Any, axis_sizes: Mapping[str, int]) -> int:
    """Return the bytes of a tree of arrays that one device holds, padding included."""

    def count(shape: Any, spec: PartitionSpec) -> int:
        stored = math.prod(stored_shape(tuple(shape.shape), spec, axis_sizes))
        shards = math.prod(axis_sizes[axis] for axis in mesh_axes(spec))
        return stored // shards * int(np.dtype(shape.dtype).itemsize)

    return sum(jax.tree.leaves(jax.tree.map(count, shapes, specs)), start=0)


def widen(param: Any) -> Any:
    """Bring a float parameter to at least float32; others stay."""
    if jnp.issubdtype(param.dtype, jnp.floating):
        return param.astype(jnp.promote_types(param.dtype, jnp.float32))
    return param


def _narrowed(param: Any, dtype: str) -> Any:
    """Bring a float parameter to a dtype; others stay."""
    return param.astype(dtype) if jnp.issubdtype(param.dtype, jnp.floating) else param
