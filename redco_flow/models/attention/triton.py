"""Flash attention on NVIDIA GPUs by Pallas' Triton (`jax.experimental.pallas.ops.gpu.attention`).

It takes segment ids, which cuDNN does not: documents of packed rows and padding need no bias. Every
token is a query and a key of one segment, so it is self-attention alone; grouped keys and values
are repeated for their heads.
Dims in this file: B batch, T sequence, H heads, G key-value groups, K head dim.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from redco_flow.models.attention.bias import Biases, SameDocument, VisibleKeys
from redco_flow.models.attention.kernel_calls import (
    HIDDEN,
    KEPT,
    on_shards,
    padded_to,
    with_named_residuals,
)
from redco_flow.models.config import AttentionConfig

# The forward pass' tokens of a block, a power of 2; shorter sequences are one block.
_BLOCK_LENGTH = 128
# The backward pass' tokens of a block, as the kernel's defaults.
_BACKWARD_BLOCK_LENGTH = 32


def triton_attend(
    config: AttentionConfig,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    biases: Biases = (),
    *,
    is_interpreted: bool = False,
) -> jax.Array:
    """Attend with queries (B, T, H, K) over keys and values (B, T, G, K) of the same tokens.

    Results (B, T, H, K) are those of `attend_grouped`, without cap, window and dropout, but for
    queries that are padding: those see padding, and are finite. The mesh's model shards divide H
    and G.

    Args:
        biases: VisibleKeys and SameDocument, one of each at most.
        is_interpreted: by Pallas' interpreter, on any device: for tests.
    """
    segments = _segments(config, query, biases)
    attend = partial(_attend_rows, config, is_interpreted=is_interpreted)
    return on_shards(attend, None, (query, key, value), segments)


def block_length(length: int) -> int:
    """Return the tokens of the forward pass' blocks: a power of 2, and no fewer than backward."""
    shortest = max(length, _BACKWARD_BLOCK_LENGTH)
    return min(_BLOCK_LENGTH, 1 << (shortest - 1).bit_length())


def _segments(config: AttentionConfig, query: jax.Array, biases: Biases) -> jax.Array | None:
    """Return the segments (B, T) of tokens; None where causal order hides all there is to hide."""
    length = query.shape[1]
    is_filled = bool(-length % block_length(length))
    if not biases and (config.is_causal or not is_filled):
        return None
    segments = jnp.zeros(query.shape[:2], jnp.int32)
    for bias in biases:
        if isinstance(bias, SameDocument):
            segments = jnp.asarray(bias.keys, jnp.int32)
    for bias in biases:
        if isinstance(bias, VisibleKeys):
            segments = jnp.where(jnp.asarray(bias.is_visible) != 0, segments, HIDDEN)
    return segments


def _attend_rows(
    config: AttentionConfig,
    shared: None,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segments: jax.Array | None,
    *,
    is_interpreted: bool,
) -> jax.Array:
    """Attend on one device, with lengths filled up to whole blocks."""
    del shared
    length = query.shape[1]
    block = block_length(length)
    kernel = with_named_residuals(_kernel(config, block, is_interpreted=is_interpreted))

    # The backward pass repeats keys and values again, which would else be kept for every head.
    @partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names(KEPT))
    def attend(query: jax.Array, key: jax.Array, value: jax.Array, ids: Any) -> jax.Array:
        rows = [padded_to(x, 1, block) for x in (query, key, value)]
        key, value = (_for_each_head(x, query.shape[2]) for x in rows[1:])
        return kernel(rows[0], key, value, ids)

    ids = None if segments is None else padded_to(segments, 1, block, fill=HIDDEN)
    attended: jax.Array = attend(query, key, value, ids)
    return attended[:, :length]


def _for_each_head(x: jax.Array, num_heads: int) -> jax.Array:
    """Repeat (B, T, G, K) to (B, T, H, K): neighbouring heads share a group."""
    return jnp.repeat(x, num_heads // x.shape[2], axis=2)


def _kernel(config: AttentionConfig, block: int, *, is_interpreted: bool) -> Any:
    """Return (query, key, value, segments) -> heads, all of H heads and whole blocks."""
    # Importing Triton's dialect takes a while, which only GPUs' users should wait for.
    from jax.experimental.pallas.ops.gpu import attention

    backward = _BACKWARD_BLOCK_LENGTH
    sizes = attention.BlockSizes(
        block_q=block,
        block_k=block,
        block_q_dkv=backward,
        block_kv_dkv=backward,
        block_q_dq=backward,
        block_kv_dq=backward,
    )

    def attend(query: jax.Array, key: jax.Array, value: jax.Array, ids: Any) -> jax.Array:
        heads: jax.Array = attention.mha(
            query, key, value, ids, config.scale, config.is_causal, sizes,
            interpret=is_interpreted,
        )  # fmt: skip
        return heads

    return attend
