"""Scaled attention in which several query heads may share one key-value head.

By XLA, which forms the scores, with softmax in float32.
Dims in this file: B batch, Q queries, M keys, H heads, G key-value groups, R heads per group,
K head dim.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from redco_flow.engine.random import dropout
from redco_flow.models.attention.bias import Biases, as_arrays, band_bias
from redco_flow.models.layer_config import AttentionConfig
from redco_flow.models.numerics import scaled, softmax, softmax_with_sinks, wide_einsum

Window = int | jax.Array | None


def attend_grouped(
    config: AttentionConfig,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    biases: Biases = (),
    *,
    window: Window = None,
    dropout_keys: jax.Array | None = None,
    dropout_site: int = 0,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Attend with queries (B, Q, H, K) over keys and values (B, M, G, K): (B, Q, H, K).

    Args:
        biases: float32, added to the scores; each broadcasts to (B, H, Q, M), or tells what is
            hidden. They come apart
            because a sum of one per head and one per row would be as large as the scores, and
            so would its gradient. A row in which every key is hidden attends to all of them
            about evenly: finite, never NaN.
        window: how many tokens back, itself included, a query looks; None: all.
        sinks: each head's score of no token (H,), where the config has them.
        dropout_keys: raw keys (B, 2); None: no dropout of the weights.
    """
    band = band_bias(query.shape[1], key.shape[1], is_causal=config.is_causal, window=window)
    added = as_arrays(biases) if band is None else (band, *as_arrays(biases))
    grouped = split_groups(scaled(query, config.scale), key.shape[2])
    scores = cap(wide_einsum("bqgrk,bmgk->bgrqm", grouped, key), config.cap)
    for bias in added:
        scores = scores + split_bias(bias, key.shape[2])
    if sinks is None:
        weights = softmax(scores).astype(value.dtype)
    else:
        by_group = sinks.reshape(key.shape[2], -1, 1, 1)
        weights = softmax_with_sinks(scores, by_group).astype(value.dtype)
    weights = dropout(weights, config.dropout, dropout_keys, dropout_site)
    return jnp.einsum("bgrqm,bmgk->bqgrk", weights, value).reshape(query.shape)


def split_groups(heads: jax.Array, num_groups: int) -> jax.Array:
    """View (…, H, K) as (…, G, R, K): neighbouring heads share a group."""
    return heads.reshape(*heads.shape[:-2], num_groups, -1, heads.shape[-1])


def split_bias(bias: jax.Array, num_groups: int) -> jax.Array:
    """View a bias that broadcasts to (B, H, Q, M) so that it does to (B, G, R, Q, M)."""
    if bias.shape[1] == 1:
        return bias[:, :, None]
    return bias.reshape(bias.shape[0], num_groups, -1, *bias.shape[2:])


def cap(scores: jax.Array, limit: float | None) -> jax.Array:
    """Soft cap: squeeze scores into (-limit, limit) by tanh, where there is a limit."""
    return scores if limit is None else limit * jnp.tanh(scores / limit)
