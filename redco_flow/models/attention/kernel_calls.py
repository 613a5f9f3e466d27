"""Calls of attention kernels on each shard's rows and heads, and the residuals that are kept.

A compiler cannot split a kernel, so all mesh axes are manual here: rows over `data` and `fsdp`,
heads over `model`.
Dims in this file: B batch, Q queries, M keys, H heads, G key-value groups, K head dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from redco_flow.models.attention.context import mapped_axes
from redco_flow.models.projections import MODEL_AXIS

# The name of what is kept of attention for the backward pass, in `activations`.
KEPT = "attention"
# The segment of keys that no query of a text sees.
HIDDEN = np.iinfo(np.int32).min

_BATCH_AXES = ("data", "fsdp")


def on_shards(
    attend: Callable[..., jax.Array],
    shared: Any,
    heads: tuple[jax.Array, jax.Array, jax.Array],
    of_rows: Any,
) -> jax.Array:
    """Run `attend` on each shard's rows and heads; what is mapped over already stays with vmap.

    Args:
        attend: (shared, query, key, value, of_rows) -> (B, Q, H, K).
        shared: a tree of arrays that every shard has.
        heads: (B, Q, H, K), (B, M, G, K) twice; the mesh's model shards divide H and G.
        of_rows: a tree of arrays (B, …).
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return attend(shared, *heads, of_rows)
    rows, by_head, multiple = row_and_head_axes()
    by_rows = PartitionSpec(rows)
    by_heads = PartitionSpec(rows, None, by_head)
    num_rows = heads[0].shape[0]
    padded = jax.tree.map(lambda x: padded_to(x, 0, multiple), (*heads, of_rows))
    # Mosaic's kernels are lowered only where every axis is manual, those of one shard too.
    attended: jax.Array = jax.shard_map(
        attend,
        in_specs=(PartitionSpec(), by_heads, by_heads, by_heads, by_rows),
        out_specs=by_heads,
        axis_names=set(mesh.axis_names),
        check_vma=False,
    )(shared, *padded)
    return attended[:num_rows]


def row_and_head_axes() -> tuple[tuple[str, ...], str | None, int]:
    """Return the mesh axes that split rows, the one that splits heads, and a multiple of rows.

    What is mapped over already stays with vmap.
    """
    mesh, mapped = jax.sharding.get_abstract_mesh(), mapped_axes()
    split = {axis: size for axis, size in mesh.shape.items() if size > 1 and axis not in mapped}
    rows = tuple(axis for axis in _BATCH_AXES if axis in split)
    by_head = MODEL_AXIS if MODEL_AXIS in split else None
    return rows, by_head, math.prod(split[axis] for axis in rows)


def padded_to(x: jax.Array, dim: int, multiple: int, *, fill: int = 0) -> jax.Array:
    """Fill a dim up to a multiple."""
    widths = [(0, 0)] * x.ndim
    widths[dim] = (0, -x.shape[dim] % multiple)
    return jnp.pad(x, widths, constant_values=fill)


def with_named_residuals(attend: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Return `attend`, of arrays, with its result and what else its backward pass keeps named.

    A kernel with a derivative of its own keeps its softmax' statistics beside its result. Where
    these have no name, a policy that keeps the result alone runs the kernel again for them.
    Residuals larger than the result have no name: those would be scores.
    """
    call = jax.custom_vjp(attend)

    def forward(*operands: Any) -> tuple[jax.Array, Any]:
        heads, pull_back = jax.vjp(attend, *operands)
        given = {id(x) for x in jax.tree.leaves(operands)}
        named = {id(heads): checkpoint_name(heads, KEPT)}

        def name(x: Any) -> Any:
            if id(x) not in named:
                is_statistic = id(x) not in given and x.size <= heads.size
                named[id(x)] = checkpoint_name(x, KEPT) if is_statistic else x
            return named[id(x)]

        return named[id(heads)], jax.tree.map(name, pull_back)

    def backward(pull_back: Any, cotangent: jax.Array) -> Any:
        return pull_back(cotangent)

    call.defvjp(forward, backward)
    return call
