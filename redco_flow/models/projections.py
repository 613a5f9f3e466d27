"""Products of activations and kernels (D, …), and several of them as one over the model shards.

Their backward pass is a custom derivative. A kernel's gradient is xᵀ·cotangent, and a matrix
product on CPUs transposes its first factor in memory: here the narrower of the two comes first.
Seen by `benchmarks/kept_files.py --file projections --models t5` on two cores: CPU time of a
training step with plain products over ours 1.42 (quartiles 1.41, 1.45).
Dims in this file: X what is contracted, Y what a kernel gives, D model, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from redco_flow.engine.step.lora_products import has_masks, plain_product_rule

Factors = tuple[jax.Array, jax.Array]


def product(x: jax.Array, kernel: jax.Array, num_contracted: int = 1) -> jax.Array:
    """Multiply activations (…, *X) by a kernel (*X, *Y): (…, *Y).

    Args:
        num_contracted: how many dims X are.
    """
    result: jax.Array = _product(num_contracted, None, x, kernel)
    return result


def wide_product(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Multiply (…, D) by (D, V): (…, V) in float32, with gradients computed in the dtype of `x`.

    Without the second half a bfloat16 model would multiply float32 cotangents by bfloat16
    weights, which accelerators do at float32 speed. A wider kernel is rounded to the dtype of `x`;
    its gradient is added up, and returned, in its own.
    """
    result: jax.Array = _product(1, jnp.float32, x, kernel)
    return result


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _product(num_contracted: int, dtype: Any, x: jax.Array, kernel: jax.Array) -> jax.Array:
    kernel = kernel.astype(x.dtype)
    return jnp.tensordot(x, kernel, num_contracted, preferred_element_type=dtype)


def _forward(
    num_contracted: int, dtype: Any, x: jax.Array, kernel: jax.Array
) -> tuple[jax.Array, Factors]:
    return _product(num_contracted, dtype, x, kernel), (x, kernel)


@plain_product_rule
def _backward(num_contracted: int, dtype: Any, factors: Factors, cotangent: jax.Array) -> Factors:
    del dtype  # the result's; gradients are in the factors'
    x, kernel = factors
    cotangent = cotangent.astype(x.dtype)
    num_given = kernel.ndim - num_contracted
    given = list(range(-num_given, 0))
    to_x = jnp.tensordot(cotangent, kernel.astype(x.dtype), (given, given))
    rows = [list(range(x.ndim - num_contracted))] * 2
    add_up = partial(jnp.tensordot, axes=rows, preferred_element_type=kernel.dtype)
    if math.prod(kernel.shape[:num_contracted]) <= math.prod(kernel.shape[num_contracted:]):
        return to_x, add_up(x, cotangent)
    transposed = add_up(cotangent, x)
    return to_x, jnp.moveaxis(transposed, list(range(num_given)), given)


_product.defvjp(_forward, _backward)

MODEL_AXIS = "model"


class SplitKernel(NamedTuple):
    """A kernel (D, …) and which of its dims is spread over the model axis."""

    value: jax.Array
    split_dim: int


def in_mesh() -> bool:
    """Say whether a mesh is being traced for; what derives sharding rules traces without one."""
    return not jax.sharding.get_abstract_mesh().empty


def num_model_shards() -> int:
    """Return the size of the mesh axis `model` that is being traced for, 1 without a mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty else dict(mesh.shape).get(MODEL_AXIS, 1)


def num_groups_held(num_groups: int, num_heads: int) -> int:
    """Return how many key-value groups to compute so that the shards can split them.

    Where there are fewer groups than shards each is repeated: every shard then has the group of
    its own heads, and no scores are exchanged. Where that does not come out even, or what the
    kernel reads has masks, as they are.
    """
    if has_masks.value:
        return num_groups
    repeated = math.lcm(num_groups, num_model_shards())
    return repeated if num_heads % repeated == 0 else num_groups


def project_together(x: jax.Array, kernels: Sequence[SplitKernel]) -> list[jax.Array]:
    """Multiply `x` (…, D) by each kernel (D, *X); give (…, *X) for each.

    Over several shards all kernels are laid side by side, shard by shard, and multiplied once, but
    where what each of them reads has masks.
    """
    num_shards = num_model_shards()
    are_even = all(kernel.shape[dim] % num_shards == 0 for kernel, dim in kernels)
    if num_shards == 1 or len(kernels) == 1 or not are_even or has_masks.value:
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
    one contraction, but where what each kernel reads has masks.
    """
    num_shards = num_model_shards()
    are_even = all(kernel.shape[0] % num_shards == 0 for _, kernel in terms)
    if num_shards == 1 or len(terms) == 1 or not are_even or has_masks.value:
        products = [product(x, kernel.astype(x.dtype), kernel.ndim - 1) for x, kernel in terms]
        return sum(products[1:], start=products[0])
    inputs, kernels = [], []
    for x, kernel in terms:
        lead = x.shape[: x.ndim - (kernel.ndim - 1)]
        inputs.append(x.reshape(*lead, num_shards, -1))
        kernels.append(kernel.astype(x.dtype).reshape(num_shards, -1, kernel.shape[-1]))
    joined, kernel = jnp.concatenate(inputs, axis=-1), jnp.concatenate(kernels, axis=1)
    return product(joined, kernel, 2)
