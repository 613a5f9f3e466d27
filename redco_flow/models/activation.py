"""The nonlinearities of feed-forward layers, gated or not.

Their backward passes compute the nonlinearity again: gelu alone would keep five arrays of this
size. Refuses to know parameters and models.
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
    """Lay the gates' gradients side by side; slices' own would be padded with zeros and added."""
    first, second = projected[..., 0, :], projected[..., 1, :]
    inner, pull_back = jax.vjp(ACTIVATION_FUNCTIONS[activation], first)
    (to_first,) = pull_back(cotangent * second)
    return (jnp.stack([to_first, cotangent * inner], axis=-2),)


_gated.defvjp(_gated_forward, _gated_backward)
