"""Defer the data-parallel gradient all-reduce to the last micro-batch (DDP's `no_sync`).

Left to itself the compiler adds gradients up over the data shards in every micro-batch. The number
of shards is that of the mesh that is being traced for.
Dims in this file: M micro-batches, B rows of one micro-batch, N data shards.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr
from jax.sharding import PartitionSpec

from redco_flow.engine.sharding.axes import equations, equations_inside, names_axis, takes_axis
from redco_flow.engine.sharding.mesh import DATA_AXIS

# (params, rows) -> anything
OfRows = Callable[[Any, Any], Any]

# What chooses for itself how it runs on devices, or has no sure way to run on one shard's rows,
# unless a shard_map that takes the axis has it run there. cuDNN's attention refuses a bias that
# heads share there.
_INDIVISIBLE = re.compile(r"custom_partitioning|pallas_call|dot_product_attention.*")

logger = logging.getLogger(__name__)


class Local(NamedTuple):
    """A function of (params, (N, B / N, ...)), its results (N, ...), and micro-batches for it."""

    of_rows: OfRows
    micro_batches: Any


def on_local_rows(of_rows: OfRows, params: Any, micro_batches: Any) -> Local | None:
    """Return `of_rows` as each data shard computes it alone, on its part of a micro-batch.

    There `data` is the name of a mapped axis: what runs on shards in its own way must take that
    mesh axis too and leave it out of its specs. None where there is one shard, or where the
    function does what has no counterpart on a part: the log says what.

    Args:
        micro_batches: a tree of arrays (M, B, ...), split over the data shards along B.
    """
    num_shards = _num_data_shards()
    if num_shards == 1 or any(x.shape[1] % num_shards for x in jax.tree.leaves(micro_batches)):
        return None
    # All rows of a micro-batch: what names the axis may need a multiple of the shards.
    rows = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), micro_batches)
    if obstacle := _find_obstacle(_trace_mapped(of_rows, params, rows)):
        logger.info(
            "gradients are added up over the %d data shards in every micro-batch, not once a "
            "step: the function to train has %s.", num_shards, obstacle,
        )  # fmt: skip
        return None
    split = jax.tree.map(
        lambda x: x.reshape(x.shape[0], num_shards, -1, *x.shape[2:]), micro_batches
    )
    return Local(_mapped(of_rows, in_axes=(None, 0)), split)


def local_zeros(like: Any) -> Any:
    """Return zeros (N, ...) of a tree of arrays (...), one for each data shard."""
    free = PartitionSpec.UNCONSTRAINED

    def zeros(x: jax.Array) -> jax.Array:
        spec = PartitionSpec(DATA_AXIS, *[free] * x.ndim)
        stacked = jnp.zeros((_num_data_shards(), *x.shape), x.dtype)
        placed: jax.Array = jax.lax.with_sharding_constraint(stacked, spec)
        return placed

    return jax.tree.map(zeros, like)


def _num_data_shards() -> int:
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty else dict(mesh.shape).get(DATA_AXIS, 1)


def _mapped(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return jax.vmap(function, axis_name=DATA_AXIS, spmd_axis_name=DATA_AXIS, **options)


def _trace_mapped(of_rows: OfRows, params: Any, rows: Any) -> ClosedJaxpr:
    """Return what is traced of the function where it is mapped, before it is."""
    found = []

    def trace(shard: jax.Array) -> jax.Array:
        found.append(jax.make_jaxpr(of_rows)(params, rows))
        return shard

    jax.eval_shape(_mapped(trace), jnp.arange(_num_data_shards()))
    return found[0]


def _find_obstacle(traced: ClosedJaxpr) -> str | None:
    if traced.effects:
        return "effects, such as callbacks"
    on_shards = {
        id(inner)
        for equation in equations(traced.jaxpr)
        if equation.primitive.name == "shard_map" and takes_axis(equation, DATA_AXIS)
        for inner in equations_inside(equation)
    }
    for equation in equations(traced.jaxpr):
        name = equation.primitive.name
        if _INDIVISIBLE.fullmatch(name) and id(equation) not in on_shards:
            return f"a {name}"
        if names_axis(equation, DATA_AXIS):
            return f"a {name} that names the mesh axis {DATA_AXIS!r}"
        if name == "shard_map" and not takes_axis(equation, DATA_AXIS):
            return f"a {name} that leaves the mesh axis {DATA_AXIS!r} to the compiler"
        if equation.params.get("vmap_method", "") is None:
            return f"a {name} without a vmap_method"
    return None
