"""Attention of one new token of each beam over what came before it.

That is a row's prompt, the same for all its beams, and each beam's own tokens since. Refuses to
know parameters, layers and how the cache grows.
Dims in this file: B batch, N beams, S prompt, C new tokens, H heads, G key-value groups, R heads
per group, K head dim.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from redco_flow.models.attention import attention_mask_bias, softmax, wide_einsum
from redco_flow.models.block_config import AttentionConfig
from redco_flow.models.grouped_attention import Window, cap, split_groups


class PromptHeads(NamedTuple):
    """What one layer keeps of the prompts.

    Attributes:
        keys, values: (B, S, G, K).
        is_visible: (B, S) whether a token may be attended to.
        back: (B, S) how many positions before the new token it stands.
    """

    keys: jax.Array
    values: jax.Array
    is_visible: jax.Array
    back: jax.Array


def attend_cached(
    config: AttentionConfig,
    query: jax.Array,
    new: tuple[jax.Array, jax.Array],
    prompt: PromptHeads | None,
    *,
    step: jax.Array,
    window: Window,
) -> jax.Array:
    """Attend with (B, N, H, K), softmax in float32: (B, N, H, K).

    Args:
        new: keys and values (B, N, G, C, K), of which those up to `step` are written.
        prompt: None where there is none.
        window: how many tokens back, itself included, a query looks; None: all.
    """
    new_keys, new_values = new
    grouped = split_groups(query * config.scale, new_keys.shape[2])
    back = step - jnp.arange(new_keys.shape[3])
    scores = cap(wide_einsum("bngrk,bngck->bngrc", grouped, new_keys), config.cap)
    scores += attention_mask_bias(_near((back >= 0), back, window))
    if prompt is None:
        weights = softmax(scores).astype(query.dtype)
        return jnp.einsum("bngrc,bngck->bngrk", weights, new_values).reshape(query.shape)
    old_scores = cap(wide_einsum("bngrk,bsgk->bngrs", grouped, prompt.keys), config.cap)
    is_visible = _near(prompt.is_visible, prompt.back, window)
    old_scores += attention_mask_bias(is_visible)[:, None, None, None, :]
    weights = softmax(jnp.concatenate([old_scores, scores], axis=-1)).astype(query.dtype)
    old_weights, new_weights = jnp.split(weights, [prompt.keys.shape[1]], axis=-1)
    heads = jnp.einsum("bngrs,bsgk->bngrk", old_weights, prompt.values)
    heads += jnp.einsum("bngrc,bngck->bngrk", new_weights, new_values)
    return heads.reshape(query.shape)


def _near(is_visible: jax.Array, back: jax.Array, window: Window) -> jax.Array:
    return is_visible if window is None else is_visible & (back < window)
