"""The nonlinearities of feed-forward layers, gated or not.

Refuses to know parameters and models.
Dims in this file: G gates, F feed-forward.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import flax.linen as nn
import jax

ACTIVATION_FUNCTIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "relu": nn.relu,
    "gelu": partial(nn.gelu, approximate=False),
    "gelu_new": partial(nn.gelu, approximate=True),
    "silu": nn.silu,
}


@partial(jax.checkpoint, static_argnums=1, prevent_cse=False)
def activate(projected: jax.Array, activation: str) -> jax.Array:
    """Apply the activation to the first gate and multiply by the second, where there is one.

    (…, G, F) to (…, F). The backward pass computes it again: gelu alone would keep five arrays
    of this size.
    """
    inner = ACTIVATION_FUNCTIONS[activation](projected[..., 0, :])
    return inner if projected.shape[-2] == 1 else inner * projected[..., 1, :]
