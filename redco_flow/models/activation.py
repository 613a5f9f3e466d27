"""The nonlinearities of feed-forward layers, gated or not.

Their backward passes compute the nonlinearity again: gelu alone would keep five arrays of this
size.
Dims in this file: G gates, F feed-forward.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp

ACTIVATION_FUNCTIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "relu": nn.relu,
    "gelu": partial(nn.gelu, approximate=False),
    "gelu_new": partial(nn.gelu, approximate=True),
    "silu": nn.silu,
}


def activate(projected: jax.Array, activation: str) -> jax.Array:
    """Apply the activation to the first gate and multiply by the second, where there is one.

    (…, G, F) to (…, F).
    """
    return (
        _plain(projected, activation) if projected.shape[-2] == 1 else _gated(activation, projected)
    )


@partial(jax.checkpoint, static_argnums=1, prevent_cse=False)
def _plain(projected: jax.Array, activation: str) -> jax.Array:
    return ACTIVATION_FUNCTIONS[activation](projected[..., 0, :])


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gated(activation: str, projected: jax.Array) -> jax.Array:
    return ACTIVATION_FUNCTIONS[activation](projected[..., 0, :]) * projected[..., 1, :]


def _gated_forward(activation: str, projected: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _gated(activation, projected), projected


def _gated_backward(
    activation: str, projected: jax.Array, cotangent: jax.Array
) -> tuple[jax.Array]:
    """Give each gate's gradient in its place by choosing between the two.

    Slices' own gradients would be padded with zeros and added. On CPUs a choice is computed in
    vectors; two computed parts laid side by side are not.
    """
    first, second = projected[..., :1, :], projected[..., 1:, :]
    inner, pull_back = jax.vjp(ACTIVATION_FUNCTIONS[activation], first)
    both = cotangent[..., None, :]
    (to_first,) = pull_back(both * second)
    is_first = jax.lax.broadcasted_iota(jnp.int32, (2, 1), 0) == 0
    return (jnp.where(is_first, to_first, both * inner),)


_gated.defvjp(_gated_forward, _gated_backward)
