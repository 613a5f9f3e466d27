"""Attention of one new token of each beam over what is kept of a sequence.

Several beams read the same keys and values, and a bias says which of them are a beam's own.
Dims in this file: B batch, N beams, M cache slots, H heads, G key-value groups, R heads per group,
K head dim.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from redco_flow.models.attention import softmax, wide_einsum
from redco_flow.models.block_config import AttentionConfig
from redco_flow.models.grouped_attention import cap, split_bias, split_groups
from redco_flow.models.layer_inputs import KeysValues


def attend_cached(
    config: AttentionConfig, query: jax.Array, kept: KeysValues, biases: tuple[jax.Array, ...]
) -> jax.Array:
    """Attend with (B, N, H, K) over keys and values (B, G, M, K), softmax in float32.

    Args:
        biases: float32, added to the scores; each broadcasts to (B, H, N, M).

    Returns:
        (B, N, H, K).
    """
    keys, values = kept
    num_groups = keys.shape[1]
    # Beams and a group's heads are the rows of one product, which is how compilers do it fastest.
    rows = jnp.swapaxes(split_groups(query * config.scale, num_groups), 1, 2)
    lead = rows.shape[:-1]
    scores = wide_einsum("bgqk,bgmk->bgqm", _rows(rows), keys)
    scores = cap(scores, config.cap).reshape(*lead, keys.shape[2])
    for bias in biases:
        scores = scores + jnp.swapaxes(split_bias(bias, num_groups), 2, 3)
    weights = softmax(scores).astype(query.dtype)
    heads = jax.lax.dot_general(_rows(weights), values, (((3,), (2,)), ((0, 1), (0, 1))))
    return jnp.swapaxes(heads.reshape(*lead, -1), 1, 2).reshape(query.shape)


def _rows(array: jax.Array) -> jax.Array:
    """View (B, G, N, R, X) as (B, G, N R, X)."""
    return array.reshape(*array.shape[:2], -1, array.shape[-1])
