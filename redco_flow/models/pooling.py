"""One vector per text from the hidden states of its tokens.

Dims in this file: B batch, T sequence, D model.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def mean_pool(hidden: jax.Array, attention_mask: jax.Array) -> jax.Array:
    """Average hidden states (B, T, D) over the tokens that are not padding: (B, D), float32.

    Args:
        attention_mask: (B, T); 0 is padding. A row without a token gives zeros.
    """
    is_token = (attention_mask != 0).astype(jnp.float32)[..., None]
    total = jnp.sum(hidden.astype(jnp.float32) * is_token, axis=1)
    return total / jnp.maximum(jnp.sum(is_token, axis=1), 1)
