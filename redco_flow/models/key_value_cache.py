"""The keys and values of tokens that have been decoded, for all layers at once.

Refuses to know layers and searches.
Dims in this file: L layers, B batch, N beams, G key-value groups, T new tokens, K head dim.
"""

from __future__ import annotations

import jax


def append(
    cache: jax.Array, heads: jax.Array, layer: jax.Array, position: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Write (B, N, G, K) into (L, B, N, G, T, K) in place; return it and the layer's part."""
    update = heads[None, :, :, :, None, :].astype(cache.dtype)
    cache = jax.lax.dynamic_update_slice(cache, update, (layer, 0, 0, 0, position, 0))
    return cache, jax.lax.dynamic_index_in_dim(cache, layer, axis=0, keepdims=False)
