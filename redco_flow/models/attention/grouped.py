"""Scaled attention in which several query heads may share one key-value head.

On NVIDIA GPUs in half precision it is cuDNN's flash attention; otherwise, and where scores are
capped or weights dropped, scores are formed and softmax is float32.
Dims in this file: B batch, Q queries, M keys, H heads, G key-value groups, R heads per group,
K head dim.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

from redco_flow.models.attention.bias import band_bias
from redco_flow.models.config import AttentionConfig
from redco_flow.models.numerics import softmax, wide_einsum
from redco_flow.models.random import dropout

_CUDNN_MAX_HEAD_DIM = 128
_CUDNN_MIN_COMPUTE_CAPABILITY = 8.0

Window = int | jax.Array | None


def attend_grouped(
    config: AttentionConfig,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    biases: tuple[jax.Array, ...] = (),
    *,
    window: Window = None,
    dropout_keys: jax.Array | None = None,
    dropout_site: int = 0,
) -> jax.Array:
    """Attend with queries (B, Q, H, K) over keys and values (B, M, G, K): (B, Q, H, K).

    Args:
        biases: float32, added to the scores; each broadcasts to (B, H, Q, M). They come apart
            because a sum of one per head and one per row would be as large as the scores, and
            so would its gradient. A row in which every key is hidden attends to all of them
            about evenly: finite, never NaN.
        window: how many tokens back, itself included, a query looks; None: all.
        dropout_keys: raw keys (B, 2); None: no dropout of the weights.
    """
    lengths = (query.shape[1], key.shape[1])
    is_odd = bool(biases) and any(length % 2 for length in lengths)
    is_learned = any(bias.shape[1] > 1 for bias in biases)  # one for each head
    if not is_odd and not is_learned and _cudnn_can(config, query, dropout_keys):
        return fused_attention(config, query, key, value, biases, window)
    band = band_bias(query.shape[1], key.shape[1], is_causal=config.is_causal, window=window)
    if band is not None:
        biases = (band, *biases)
    grouped = split_groups(query * config.scale, key.shape[2])
    scores = cap(wide_einsum("bqgrk,bmgk->bgrqm", grouped, key), config.cap)
    for bias in biases:
        scores = scores + split_bias(bias, key.shape[2])
    weights = softmax(scores).astype(value.dtype)
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


def _cudnn_can(config: AttentionConfig, query: jax.Array, dropout_keys: jax.Array | None) -> bool:
    drops = dropout_keys is not None and config.dropout > 0
    fits = config.head_dim <= _CUDNN_MAX_HEAD_DIM and config.head_dim % 8 == 0
    if drops or config.cap is not None or not fits or query.dtype != jnp.bfloat16:
        return False
    if jax.default_backend() != "gpu":
        return False
    device = jax.devices()[0]
    is_nvidia = "cuda" in device.client.platform_version.lower()
    return is_nvidia and float(device.compute_capability) >= _CUDNN_MIN_COMPUTE_CAPABILITY


def fused_attention(
    config: AttentionConfig,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    biases: tuple[jax.Array, ...],
    window: Window,
    implementation: Literal["cudnn", "xla"] = "cudnn",
) -> jax.Array:
    """Do what `attend_grouped` does, but for caps and dropout, by JAX's own attention."""
    if isinstance(window, jax.Array):
        # One that differs between layers is no constant of a kernel, but one more bias.
        band = band_bias(query.shape[1], key.shape[1], is_causal=False, window=window)
        assert band is not None
        biases, window = (band, *biases), None
    bias = None
    if biases:
        shape = (query.shape[0], 1, query.shape[1], key.shape[1])
        bias = jnp.broadcast_to(sum(biases[1:], start=biases[0]), shape).astype(query.dtype)
    heads: jax.Array = jax.nn.dot_product_attention(
        query,
        key,
        value,
        bias=bias,
        scale=config.scale,
        is_causal=config.is_causal,
        local_window_size=None if window is None else (window - 1, 0),
        implementation=implementation,
    )
    return heads
