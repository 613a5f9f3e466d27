"""Products of activations with kernels that are split over the mesh axis `model`.

Two kernels that read the same activation are one product, and two products that are added are one
contraction: then each is followed, backward or forward, by one reduction instead of two. Compilers
for accelerators would merge those; the one for CPUs does not. The number of shards is that of the
mesh that is being traced for; without one each kernel is a product of its own.
Dims in this file: D model, S the split dim, X what a kernel gives, N shards.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from redco_flow.models.product import product

MODEL_AXIS = "model"


class SplitKernel(NamedTuple):
    """A kernel (D, …) and which of its dims is spread over the model axis."""

    value: jax.Array
    split_dim: int


def num_model_shards() -> int:
    """Return the size of the mesh axis `model` that is being traced for, 1 without a mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty else dict(mesh.shape).get(MODEL_AXIS, 1)


def num_groups_held(num_groups: int, num_heads: int) -> int:
    """Return how many key-value groups to compute so that the shards can split them.

    Where there are fewer groups than shards each is repeated: every shard then has the group of
    its own heads, and no scores are exchanged. Where that does not come out even, as they are.
    """
    repeated = math.lcm(num_groups, num_model_shards())
    return repeated if num_heads % repeated == 0 else num_groups


def project_together(x: jax.Array, kernels: Sequence[SplitKernel]) -> list[jax.Array]:
    """Multiply `x` (…, D) by each kernel (D, *X); give (…, *X) for each.

    Over several shards all kernels are laid side by side, shard by shard, and multiplied once.
    """
    num_shards = num_model_shards()
    are_even = all(kernel.shape[dim] % num_shards == 0 for kernel, dim in kernels)
    if num_shards == 1 or len(kernels) == 1 or not are_even:
        return [product(x, kernel.astype(x.dtype)) for kernel, _ in kernels]
    flat = [
        jnp.moveaxis(kernel.astype(x.dtype), dim, 1).reshape(kernel.shape[0], num_shards, -1)
        for kernel, dim in kernels
    ]
    together = product(x, jnp.concatenate(flat, axis=-1))
    ends = np.cumsum([part.shape[-1] for part in flat])[:-1].tolist()
    return [
        _unflatten(part, kernel)
        for part, kernel in zip(jnp.split(together, ends, axis=-1), kernels, strict=True)
    ]


def _unflatten(product: jax.Array, kernel: SplitKernel) -> jax.Array:
    """Bring (…, N, X / N) to (…, *X)."""
    value, dim = kernel
    lead = product.shape[:-2]
    others = [size for place, size in enumerate(value.shape) if place not in (0, dim)]
    parted = product.reshape(*lead, value.shape[dim], *others)
    return jnp.moveaxis(parted, len(lead), len(lead) + dim - 1)


def merge_together(terms: Sequence[tuple[jax.Array, jax.Array]]) -> jax.Array:
    """Add the products of activations (…, *X) with their kernels (*X, D): (…, D).

    The first of each pair's X dims is the one that is split; over several shards all terms are
    one contraction.
    """
    num_shards = num_model_shards()
    are_even = all(kernel.shape[0] % num_shards == 0 for _, kernel in terms)
    if num_shards == 1 or len(terms) == 1 or not are_even:
        products = [product(x, kernel.astype(x.dtype), kernel.ndim - 1) for x, kernel in terms]
        return sum(products[1:], start=products[0])
    inputs, kernels = [], []
    for x, kernel in terms:
        lead = x.shape[: x.ndim - (kernel.ndim - 1)]
        inputs.append(x.reshape(*lead, num_shards, -1))
        kernels.append(kernel.astype(x.dtype).reshape(num_shards, -1, kernel.shape[-1]))
    joined, kernel = jnp.concatenate(inputs, axis=-1), jnp.concatenate(kernels, axis=1)
    return product(joined, kernel, 2)
