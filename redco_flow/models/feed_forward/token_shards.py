"""Layers that act on each token separately: each device computes its tokens with its units.

Left to itself the compiler would sort the tokens of all data shards together before their experts,
and reduce each expert's output over the model shards before a token's are added up; and of tokens
taken some at a time it would reduce the kernels' gradients each time. Here nothing of tokens or
kernels moves, one reduction follows, and a kernel's gradient is reduced once. The axes are those of
the mesh that is being traced for, apart from those that are mapped over already.
Dims in this file: B batch, T sequence, D model, F feed-forward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from redco_flow.models.attention.context import CONTEXT_AXIS, mapped_axes
from redco_flow.models.projections import MODEL_AXIS, SplitKernel

BATCH_AXES = ("data", "fsdp")

# (arrays (N, …) of tokens, kernels) -> (N, D): a sum over F
Compute = Callable[[Sequence[jax.Array], Sequence[jax.Array]], jax.Array]


def compute_on_shards(
    compute: Compute, tokens: Sequence[jax.Array], kernels: Sequence[SplitKernel]
) -> jax.Array:
    """Compute (B, T, D) from arrays (B, T, …) and kernels.

    Where the model shards do not divide F, each computes all of it.

    Args:
        tokens: the first is as wide as the result.
        kernels: the dim that is split is F.
    """
    x, values = tokens[0], [value for value, _ in kernels]

    def of_rows(tokens: Sequence[jax.Array], kernels: Sequence[jax.Array]) -> jax.Array:
        flat = [array.reshape(-1, *array.shape[2:]) for array in tokens]
        return compute(flat, kernels).reshape(tokens[0].shape)

    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return of_rows(tokens, values)
    mapped = mapped_axes()
    split = {axis: size for axis, size in mesh.shape.items() if size > 1 and axis not in mapped}
    batch, sequence = (_present(split, *axes) for axes in (BATCH_AXES, (CONTEXT_AXIS,)))
    are_even = all(value.shape[dim] % split.get(MODEL_AXIS, 1) == 0 for value, dim in kernels)
    units = _present(split, MODEL_AXIS) if are_even else ()

    def on_shard(tokens: Sequence[jax.Array], kernels: Sequence[jax.Array]) -> jax.Array:
        return _added_up(of_rows(tokens, kernels), units)

    spec = PartitionSpec(batch, sequence)
    num_rows, length = x.shape[:2]
    multiples = _size(split, batch), _size(split, sequence)
    outer: jax.Array = jax.shard_map(
        on_shard,
        in_specs=(spec, [PartitionSpec(*[None] * dim, units) for _, dim in kernels]),
        out_specs=spec,
        axis_names={*split, *mapped},
        check_vma=False,
    )([_padded(array, *multiples) for array in tokens], values)
    return outer[:num_rows, :length]


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _added_up(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Add up over the axes. What comes back is the same everywhere, and need not be added up."""
    added: jax.Array = jax.lax.psum(x, axes)
    return added


def _added_up_forward(x: jax.Array, axes: tuple[str, ...]) -> tuple[jax.Array, None]:
    return _added_up(x, axes), None


def _added_up_backward(axes: tuple[str, ...], _: None, cotangent: jax.Array) -> tuple[jax.Array]:
    # `shard_map` gives each of the shards its share of the cotangent.
    return (cotangent * jax.lax.axis_size(axes),)


_added_up.defvjp(_added_up_forward, _added_up_backward)


def _present(sizes: Mapping[str, int], *axes: str) -> tuple[str, ...]:
    return tuple(axis for axis in axes if axis in sizes)


def _size(sizes: Mapping[str, int], axes: tuple[str, ...]) -> int:
    return math.prod(sizes[axis] for axis in axes)


def _padded(x: jax.Array, *multiples: int) -> jax.Array:
    """Pad leading dims with zeros to multiples of these numbers."""
    widths = [(0, -size % of) for size, of in zip(x.shape, multiples, strict=False)]
    return jnp.pad(x, [*widths, *[(0, 0)] * (x.ndim - len(widths))])
