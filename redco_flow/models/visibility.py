"""Who may attend to whom, and at which position each token stands.

Causality, sliding windows, padding on either side and several documents packed into one row. Pure
functions of arrays.
Dims in this file: B batch, T sequence, Q queries, M keys.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from redco_flow.models.attention import attention_mask_bias
from redco_flow.models.blockwise_bias import Bias, Biases, SameDocument, VisibleKeys
from redco_flow.models.context_axis import num_context_shards


def band_bias(
    num_queries: int, num_keys: int, *, is_causal: bool, window: int | jax.Array | None
) -> jax.Array | None:
    """Return (1, 1, Q, M) that hides the future and what lies `window` or more tokens back.

    None where nothing is hidden. Query i stands at the place of key i.
    """
    back = jnp.arange(num_queries)[:, None] - jnp.arange(num_keys)[None, :]
    visible = back >= 0 if is_causal else None
    if window is not None:
        near = back < window
        visible = near if visible is None else visible & near
    return None if visible is None else attention_mask_bias(visible)[None, None]


def row_biases(attention_mask: jax.Array | None, segment_ids: jax.Array | None) -> Biases:
    """Return what hides padding and other documents, each broadcasting to (B, 1, Q, M).

    Over several context shards they are told by blocks.

    Args:
        attention_mask: (B, T); 0 is padding.
        segment_ids: (B, T); which of a row's documents a token belongs to.
    """
    biases: Biases = ()
    if attention_mask is not None:
        biases = (*biases, padding_bias(attention_mask))
    if segment_ids is not None:
        biases = (*biases, _document_bias(segment_ids))
    return biases


def padding_bias(attention_mask: jax.Array) -> Bias:
    """Return what hides padding from every query, (B, 1, 1, M) or told by blocks."""
    if num_context_shards() > 1:
        return VisibleKeys(attention_mask)
    return attention_mask_bias(attention_mask)[:, None, None, :]


def _document_bias(segment_ids: jax.Array) -> Bias:
    if num_context_shards() > 1:
        return SameDocument(segment_ids, segment_ids)
    is_same = segment_ids[:, :, None] == segment_ids[:, None, :]
    return attention_mask_bias(is_same)[:, None]


def default_positions(
    shape: tuple[int, ...], attention_mask: jax.Array | None, segment_ids: jax.Array | None
) -> jax.Array:
    """Return position ids (B, T), counted from 0 over what is not padding.

    In every document of a packed row they begin anew. Padding stands at 0 before the first
    token and at the last token's position after it, as in transformers.
    """
    places = jnp.broadcast_to(jnp.arange(shape[1]), shape)
    if segment_ids is not None:
        is_first = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)))
        return places - jax.lax.cummax(jnp.where(is_first, places, 0), axis=1)
    if attention_mask is None:
        return places
    counted = jnp.cumsum((attention_mask != 0).astype(jnp.int32), axis=1)
    return jnp.maximum(counted - 1, 0)
