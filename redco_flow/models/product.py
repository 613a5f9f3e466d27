"""Activations times kernels, with a backward pass that turns as few numbers as it can.

Pure functions of arrays. A kernel's gradient contracts two arrays of one row per token, and on CPUs
a matrix product reads its first factor turned: differentiation as it comes often turns the wider
one, which costs as much as the product itself.
Dims in this file: X what is contracted, Y what a kernel gives, D model, V vocabulary.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

# The name of what a policy that keeps products keeps.
KEPT_PRODUCT = "product"
Factors = tuple[jax.Array, jax.Array]


def product(x: jax.Array, kernel: jax.Array, num_contracted: int = 1) -> jax.Array:
    """Multiply activations (…, *X) by a kernel (*X, *Y): (…, *Y).

    Args:
        num_contracted: how many dims X are.
    """
    result: jax.Array = _product(num_contracted, None, x, kernel)
    return result


def wide_product(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Multiply (…, D) by (D, V): (…, V) in float32, with gradients computed in the inputs' dtype.

    Without the second half a bfloat16 model would multiply float32 cotangents by bfloat16
    weights, which accelerators do at float32 speed.
    """
    result: jax.Array = _product(1, jnp.float32, x, kernel)
    return result


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _product(num_contracted: int, dtype: Any, x: jax.Array, kernel: jax.Array) -> jax.Array:
    return jnp.tensordot(x, kernel, num_contracted, preferred_element_type=dtype)


def _forward(
    num_contracted: int, dtype: Any, x: jax.Array, kernel: jax.Array
) -> tuple[jax.Array, Factors]:
    # Named here, where no policy could tell by itself what a rule of ours computes.
    result = checkpoint_name(_product(num_contracted, dtype, x, kernel), KEPT_PRODUCT)
    return result, (x, kernel)


def _backward(num_contracted: int, dtype: Any, factors: Factors, cotangent: jax.Array) -> Factors:
    del dtype  # the result's; gradients are in the factors'
    x, kernel = factors
    cotangent = cotangent.astype(x.dtype)
    given = range(num_contracted, kernel.ndim)
    tokens = range(x.ndim - num_contracted)
    to_x = _contract(cotangent, range(len(tokens), cotangent.ndim), kernel, given)
    if math.prod(kernel.shape[:num_contracted]) <= math.prod(kernel.shape[num_contracted:]):
        return to_x, _contract(x, tokens, cotangent, tokens)
    turned = _contract(cotangent, tokens, x, tokens)
    order = (*range(len(given), kernel.ndim), *range(len(given)))
    return to_x, jnp.transpose(turned, order)


_product.defvjp(_forward, _backward)


def _contract(a: jax.Array, a_dims: range, b: jax.Array, b_dims: range) -> jax.Array:
    return jax.lax.dot_general(a, b, ((tuple(a_dims), tuple(b_dims)), ((), ())))
