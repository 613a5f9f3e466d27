"""TPUs' splash attention (`jax.experimental.pallas.ops.tpu.splash_attention`) on every shard.

The kernel works through blocks of queries and keys and keeps no scores; blocks of which nothing is
seen are not computed.
Dims in this file: B batch, Q queries, M keys, H heads, G key-value groups, K head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from redco_flow.models.attention.bias import Biases, SameDocument, VisibleKeys
from redco_flow.models.attention.grouped import Window
from redco_flow.models.attention.kernel_calls import HIDDEN, KEPT, on_shards, padded_to
from redco_flow.models.layer_config import AttentionConfig
from redco_flow.models.numerics import scaled

# What a block's length is a multiple of, and the lengths that are tried, the fastest first.
_LANES = 128
_BLOCK_LENGTHS = (512, 384, 256)

# Segment ids of queries (B, Q) and keys (B, M): a query sees the keys of its own segment.
Segments = tuple[jax.Array, jax.Array]


def splash_attend(
    config: AttentionConfig,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    biases: Biases = (),
    *,
    window: Window = None,
    windows: tuple[int, ...] = (),
    is_interpreted: bool = False,
) -> jax.Array:
    """Attend with queries (B, Q, H, K) over keys and values (B, M, G, K): (B, Q, H, K).

    Results are those of `attend_grouped`, but for queries that may see no key at all: those stay
    finite. The mesh's model shards divide H and G.

    Args:
        biases: VisibleKeys and SameDocument, one of each at most.
        window: how many tokens back, itself included, a query looks; None: all.
        windows: the values that `window` may have, where it is an array.
        is_interpreted: by Pallas' interpreter, on any device: for tests.
    """
    choices = windows if isinstance(window, jax.Array) else (window,)
    number = jnp.argmax(jnp.asarray(windows) == window) if len(choices) > 1 else None
    make = partial(_make_kernel, config, is_interpreted=is_interpreted)
    branches = [partial(_attend_rows, partial(make, choice)) for choice in choices]

    def attend(number: jax.Array | None, *operands: Any) -> jax.Array:
        attended: jax.Array = (
            branches[0](*operands)
            if number is None
            else jax.lax.switch(number, branches, *operands)
        )
        return attended

    segments = _segments(config, query, key, biases)
    return on_shards(attend, number, (scaled(query, config.scale), key, value), segments)


def _attend_rows(
    make_kernel: Callable[..., Any],
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segments: Segments | None,
) -> jax.Array:
    """Attend on one device, with lengths filled up to whole blocks."""
    blocks = block_length(query.shape[1]), block_length(key.shape[1])
    query_rows, key_rows, value_rows = (
        jnp.swapaxes(padded_to(x, 1, block), 1, 2)
        for x, block in ((query, blocks[0]), (key, blocks[1]), (value, blocks[1]))
    )
    kernel = make_kernel(query_rows, key_rows, blocks)
    ids = None
    if segments is not None:
        of_queries, of_keys = segments
        ids = _splash().SegmentIds(
            padded_to(of_queries, 1, blocks[0]), padded_to(of_keys, 1, blocks[1], fill=HIDDEN)
        )
    attended = jax.vmap(kernel)(query_rows, key_rows, value_rows, ids)
    return jnp.swapaxes(attended, 1, 2)[:, : query.shape[1]]


def block_length(length: int) -> int:
    """Return the tokens of a block: what fills a sequence up least, then the most."""
    if length <= _BLOCK_LENGTHS[-1]:
        return length + -length % _LANES
    return min(_BLOCK_LENGTHS, key=lambda block: (length + -length % block, -block))


def _make_kernel(
    config: AttentionConfig,
    window: int | None,
    query: jax.Array,
    key: jax.Array,
    blocks: tuple[int, int],
    *,
    is_interpreted: bool,
) -> Any:
    """Return the kernel for queries (B, H, Q, K) and keys (B, G, M, K), without the batch."""
    splash = _splash()
    shape = query.shape[2], key.shape[2]
    if window is None or window >= shape[1]:
        mask = splash.CausalMask(shape) if config.is_causal else splash.FullMask(shape)
    else:
        mask = splash.LocalMask(shape, (window - 1, 0 if config.is_causal else None), offset=0)
    of_queries, of_keys = blocks
    sizes = splash.BlockSizes(
        block_q=of_queries,
        block_kv=of_keys,
        block_q_dkv=of_queries,
        block_kv_dkv=of_keys,
        block_q_dq=of_queries,
        block_kv_dq=of_keys,
    )
    return splash.make_splash_mha(
        splash.MultiHeadMask([mask] * query.shape[1]),
        block_sizes=sizes,
        head_shards=1,
        q_seq_shards=1,
        attn_logits_soft_cap=config.cap,
        # With its log-sum-exp: without either the backward pass would run the kernel again.
        residual_checkpoint_name=KEPT,
        interpret=is_interpreted,
    )


def _segments(
    config: AttentionConfig, query: jax.Array, key: jax.Array, biases: Biases
) -> Segments | None:
    """Return the segments that hide what biases hide, and what fills keys up to whole blocks."""
    num_keys = key.shape[1]
    is_filled = bool(-num_keys % block_length(num_keys))
    # Causal queries see no key behind the text's last one.
    if not biases and (config.is_causal or not is_filled):
        return None
    of_queries, of_keys = (jnp.zeros(x.shape[:2], jnp.int32) for x in (query, key))
    for bias in biases:
        if isinstance(bias, SameDocument):
            of_queries, of_keys = (jnp.asarray(x, jnp.int32) for x in bias)
    for bias in biases:
        if isinstance(bias, VisibleKeys):
            of_keys = jnp.where(jnp.asarray(bias.is_visible) != 0, of_keys, HIDDEN)
    return of_queries, of_keys


def _splash() -> Any:
    # Importing Mosaic takes most of a second, which only TPUs' users should wait for.
    from jax.experimental.pallas.ops.tpu import splash_attention

    return splash_attention
