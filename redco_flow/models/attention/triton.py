"""Flash attention on NVIDIA GPUs by Pallas' Triton (`triton_kernels`), of a model's arguments.

Padding and documents of packed rows are passed as segment ids, a window as a number of tokens, so
nothing is as large as the scores.
Dims in this file: B batch, Q queries, M keys, H heads, G key-value groups, K head dim.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from redco_flow.models.attention.bias import Biases, SameDocument, VisibleKeys
from redco_flow.models.attention.grouped import Window
from redco_flow.models.attention.kernel_calls import (
    HIDDEN,
    KEPT,
    on_shards,
    padded_to,
    with_named_residuals,
)
from redco_flow.models.layer_config import AttentionConfig

if TYPE_CHECKING:
    from redco_flow.models.attention.triton_blocks import BlockSizes


def triton_attend(
    config: AttentionConfig,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    biases: Biases = (),
    *,
    window: Window = None,
    blocks: BlockSizes | None = None,
    is_interpreted: bool = False,
) -> jax.Array:
    """Attend with queries (B, Q, H, K) over keys and values (B, M, G, K): (B, Q, H, K).

    Results are those of `attend_grouped`, without dropout, but for queries that see no key: those
    are 0. The mesh's model shards divide H and G.

    Args:
        biases: VisibleKeys and SameDocument, one of each at most.
        window: how many tokens back, itself included, a query looks; None: all.
        blocks: how many tokens a program works on at once; None: as GPUs do it fast.
        is_interpreted: by Pallas' interpreter, on any device: for tests.
    """
    attend = partial(_attend_rows, config, blocks=blocks, is_interpreted=is_interpreted)
    shared = _window_array(window, query.shape[1], key.shape[1])
    return on_shards(attend, shared, (query, key, value), _segments(query, key, biases))


def _window_array(window: Window, num_queries: int, num_keys: int) -> jax.Array | None:
    """Return the window as (1,); None where it hides nothing."""
    if window is None or (isinstance(window, int) and window >= num_queries):
        return None
    # No sum of places and a window overflows.
    return jnp.minimum(jnp.asarray(window, jnp.int32), num_queries + num_keys).reshape(1)


def _segments(
    query: jax.Array, key: jax.Array, biases: Biases
) -> tuple[jax.Array, jax.Array] | None:
    """Return the segments of queries (B, Q) and keys (B, M); None: all see all."""
    if not biases:
        return None
    queries, keys = (jnp.zeros(x.shape[:2], jnp.int32) for x in (query, key))
    for bias in biases:
        if isinstance(bias, SameDocument):
            queries, keys = (jnp.asarray(ids, jnp.int32) for ids in (bias.queries, bias.keys))
    for bias in biases:
        if isinstance(bias, VisibleKeys):
            keys = jnp.where(jnp.asarray(bias.is_visible) != 0, keys, HIDDEN)
    return queries, keys


def _attend_rows(
    config: AttentionConfig,
    window: jax.Array | None,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segments: tuple[jax.Array, jax.Array] | None,
    *,
    blocks: BlockSizes | None,
    is_interpreted: bool,
) -> jax.Array:
    """Attend on one device, with lengths filled up to whole blocks."""
    # Importing Triton's dialect takes a while, which only GPUs' users should wait for.
    from redco_flow.models.attention import triton_blocks, triton_kernels

    num_queries, num_keys = query.shape[1], key.shape[1]
    blocks = blocks or triton_blocks.BlockSizes.of(
        num_queries, num_keys, config.head_dim, query.dtype.itemsize
    )
    form = triton_blocks.Form(
        config.scale, config.cap, config.is_causal, num_keys, blocks, is_interpreted
    )

    def kernel(*operands: Any) -> jax.Array:
        given = triton_blocks.Operands(*operands)
        heads: jax.Array = triton_kernels.flash_attention(form, given)
        return heads

    named = with_named_residuals(kernel)

    # What fills up is not kept for the backward pass: it is done again.
    @partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names(KEPT))
    def attend(query: jax.Array, key: jax.Array, value: jax.Array, ids: Any) -> jax.Array:
        query = padded_to(query, 1, blocks.of_queries)
        key, value = (padded_to(x, 1, blocks.of_keys) for x in (key, value))
        if ids is not None:
            of_queries, of_keys = ids
            ids = triton_blocks.Segments(
                padded_to(of_queries, 1, blocks.of_queries),
                padded_to(of_keys, 1, blocks.of_keys, fill=HIDDEN),
            )
        return named(query, key, value, ids, window)

    attended: jax.Array = attend(query, key, value, segments)
    return attended[:, :num_queries]
