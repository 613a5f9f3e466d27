"""The mesh axis `context`, over which sequences are split: how many shards, and what lies there.

The number of shards is that of the mesh that is being traced for; without one nothing is split.
Dims in this file: B batch, T sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec

from redco_flow.models.mapped_axes import mapped_axes

CONTEXT_AXIS = "context"


def num_context_shards() -> int:
    """Return the size of the mesh axis `context` that is being traced for, 1 without a mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty else dict(mesh.shape).get(CONTEXT_AXIS, 1)


def split_sequence(x: jax.Array) -> jax.Array:
    """Lay (B, T, …) out with T over the context shards; the other dims stay as they are."""
    if num_context_shards() == 1:
        return x
    free = PartitionSpec.UNCONSTRAINED
    spec = PartitionSpec(free, CONTEXT_AXIS, *[free] * (x.ndim - 2))
    placed: jax.Array = jax.lax.with_sharding_constraint(x, spec)
    return placed


def on_context_shards(function: Callable[..., Any], *, in_specs: Any, out_specs: Any) -> Any:
    """Return `function` as each context shard runs it; the other mesh axes stay the compiler's.

    Where it is mapped over one of these by name, as by `jax.vmap`, each of that axis' shards runs
    it on its own part.

    Args:
        in_specs, out_specs: PartitionSpecs, in trees like arguments and results.
    """
    return jax.shard_map(
        function,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names={CONTEXT_AXIS, *mapped_axes()},
        check_vma=False,
    )
