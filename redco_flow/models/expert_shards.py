"""Where experts compute: each device its own tokens, with its own part of every expert's units.

Left to itself the compiler would sort the tokens of all data shards together, and reduce each
expert's output over the model shards before a token's are added up: here nothing of tokens or
kernels moves, and one reduction follows. The axes are those of the mesh that is being traced for.
Refuses to know what is computed.
Dims in this file: B batch, T sequence, D model, E experts, F feed-forward.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, PartitionSpec

from redco_flow.models.context_axis import CONTEXT_AXIS
from redco_flow.models.projections import MODEL_AXIS

BATCH_AXES = ("data", "fsdp")

# tokens (N, D), their router logits (N, E), wi (E, D, 2, F), wo (E, F, D) to (N, D): a sum over F
Compute = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]


def compute_on_shards(
    compute: Compute, x: jax.Array, router_logits: jax.Array, wi: jax.Array, wo: jax.Array
) -> jax.Array:
    """Compute (B, T, D) from x (B, T, D), router logits (B, T, E) and the experts' kernels.

    Where the model shards do not divide F, each computes all of it.
    """

    def of_rows(x: jax.Array, router_logits: jax.Array, *kernels: jax.Array) -> jax.Array:
        flat = (array.reshape(-1, array.shape[-1]) for array in (x, router_logits))
        return compute(*flat, *kernels).reshape(x.shape)

    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return of_rows(x, router_logits, wi, wo)
    batch, sequence = _present(mesh, *BATCH_AXES), _present(mesh, CONTEXT_AXIS)
    units = _present(mesh, MODEL_AXIS) if wo.shape[1] % mesh.shape.get(MODEL_AXIS, 1) == 0 else ()

    def on_shard(x: jax.Array, router_logits: jax.Array, wi: jax.Array, wo: jax.Array) -> jax.Array:
        # Said here, so that gradients are added up over shards once and where they are smallest.
        tokens = jax.lax.pcast((x, router_logits), units, to="varying")
        kernels = jax.lax.pcast((wi, wo), (*batch, *sequence), to="varying")
        added: jax.Array = jax.lax.psum(of_rows(*tokens, *kernels), units)
        return added

    spec = PartitionSpec(batch, sequence)
    num_rows, length = x.shape[:2]
    multiples = _size(mesh, batch), _size(mesh, sequence)
    outer: jax.Array = jax.shard_map(
        on_shard,
        in_specs=(spec, spec, PartitionSpec(None, None, None, units), PartitionSpec(None, units)),
        out_specs=spec,
    )(_padded(x, *multiples), _padded(router_logits, *multiples), wi, wo)
    return outer[:num_rows, :length]


def _present(mesh: AbstractMesh, *axes: str) -> tuple[str, ...]:
    return tuple(axis for axis in axes if axis in mesh.shape)


def _size(mesh: AbstractMesh, axes: tuple[str, ...]) -> int:
    size = 1
    for axis in axes:
        size *= mesh.shape[axis]
    return size


def _padded(x: jax.Array, *multiples: int) -> jax.Array:
    """Pad leading dims with zeros to multiples of these numbers."""
    widths = [(0, -size % of) for size, of in zip(x.shape, multiples, strict=False)]
    return jnp.pad(x, [*widths, *[(0, 0)] * (x.ndim - len(widths))])
