"""The training state before the first step, and how it is split: from shapes alone.

The optimizer's arrays lie as the parameters they belong to.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

from redco_flow.engine.optimizer_sharding import optimizer_fused, optimizer_specs
from redco_flow.engine.sharding import ShardingRules, mesh_axes, stored_shape
from redco_flow.engine.train_step import State, counting_skipped, initial_state

logger = logging.getLogger(__name__)


def start_state(
    params: Any,
    optimizer: optax.GradientTransformation,
    seed: int,
    *,
    counts_skipped: bool = False,
    trainable: Any = None,
) -> State:
    """Return the state before the first step, what is trained of it in float32 or wider.

    Args:
        trainable: a tree of bools; None: all parameters.
    """
    mask = jax.tree.map(lambda _: True, params) if trainable is None else trainable
    own = jax.tree.map(lambda on, param: _widen(param) if on else param, mask, params)
    state = initial_state(own, optimizer, seed)
    return counting_skipped(state) if counts_skipped else state


def state_layout(
    params: Any,
    optimizer: optax.GradientTransformation,
    rules: ShardingRules,
    *,
    counts_skipped: bool = False,
    trainable: Any = None,
) -> tuple[Any, Any]:
    """Return the state's tree of shapes and its tree of PartitionSpecs.

    Args:
        params: arrays or shapes.
    """
    start = partial(start_state, counts_skipped=counts_skipped, trainable=trainable)
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


def _widen(param: Any) -> Any:
    """Bring a float parameter to at least float32; others stay."""
    if jnp.issubdtype(param.dtype, jnp.floating):
        return param.astype(jnp.promote_types(param.dtype, jnp.float32))
    return param
