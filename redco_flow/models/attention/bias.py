"""Biases and masks of attention scores, in a form from which any block of them can be computed.

A full bias would be as large as the scores, which no device holds where sequences are split. Pure
functions of arrays.
Dims in this file: B batch, Q queries, M keys, H heads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from redco_flow.models.numerics import attention_mask_bias


def position_buckets(
    distances: np.ndarray, *, bidirectional: bool, num_buckets: int, max_distance: int
) -> np.ndarray:
    """Map key position minus query position to a bucket in [0, num_buckets).

    Near distances have a bucket each, far ones share logarithmically wider ones, and all from
    `max_distance` on share the last.
    """
    buckets = np.zeros(distances.shape, np.int32)
    if bidirectional:
        num_buckets //= 2
        buckets += (distances > 0).astype(np.int32) * num_buckets
        distances = np.abs(distances)
    else:
        distances = np.maximum(-distances, 0)
    num_exact = num_buckets // 2
    # float32 in this order, as the reference does: a distance on a boundary falls the same way.
    ratio = np.maximum(distances, 1).astype(np.float32) / np.float32(num_exact)
    growth = np.log(ratio) / np.float32(math.log(max_distance / num_exact))
    far = num_exact + (growth * np.float32(num_buckets - num_exact)).astype(np.int32)
    far = np.minimum(far, num_buckets - 1)
    return buckets + np.where(distances < num_exact, distances, far).astype(np.int32)


def distance_bias(
    table: jax.Array, distances: np.ndarray, *, bidirectional: bool, max_distance: int
) -> jax.Array:
    """Look up the bias of each distance: (buckets, H) and (N,) give (H, N)."""
    buckets = position_buckets(
        distances,
        bidirectional=bidirectional,
        num_buckets=table.shape[0],
        max_distance=max_distance,
    )
    return table[buckets].T


def spread_diagonals(by_distance: jax.Array, num_queries: int, num_keys: int) -> jax.Array:
    """Lay (H, Q + M - 1) out as (H, Q, M) with entry [q, m] = by_distance[m - q + Q - 1]."""
    num_heads, length = by_distance.shape
    padded = jnp.pad(by_distance, ((0, 0), (0, 1)))
    tiled = jnp.broadcast_to(padded[:, None], (num_heads, num_queries, length + 1))
    # Rows of length L + 1 read as rows of length L: each starts one element earlier.
    flat = tiled.reshape(num_heads, -1)[:, : num_queries * length]
    return flat.reshape(num_heads, num_queries, length)[:, :, num_queries - 1 :]


class ScoreBlock(NamedTuple):
    """A rectangle of the scores: its first query and key, and how many of each."""

    first_query: jax.Array
    num_queries: int
    first_key: jax.Array
    num_keys: int

    @property
    def queries(self) -> jax.Array:
        """Return the queries' numbers, (Q,)."""
        return self.first_query + jnp.arange(self.num_queries)

    @property
    def keys(self) -> jax.Array:
        """Return the keys' numbers, (M,)."""
        return self.first_key + jnp.arange(self.num_keys)


class VisibleKeys(NamedTuple):
    """Hides padding from every query.

    Attributes:
        is_visible: (B, M); 0 is hidden.
    """

    is_visible: jax.Array

    def padded(self, num_queries: int, num_keys: int) -> VisibleKeys:
        """Return it for longer sequences."""
        del num_queries
        return VisibleKeys(_padded(self.is_visible, num_keys))

    def block(self, block: ScoreBlock) -> jax.Array:
        """Return (B, 1, 1, M) of a block."""
        return VisibleKeys(self.visible(block)).whole()

    def visible(self, block: ScoreBlock) -> jax.Array:
        """Return (B, M) of a block's keys; 0 is hidden."""
        return _part(self.is_visible, block.first_key, block.num_keys)

    def whole(self) -> jax.Array:
        """Return (B, 1, 1, M)."""
        return attention_mask_bias(self.is_visible)[:, None, None, :]


class SameDocument(NamedTuple):
    """Hides other documents of a packed row.

    Attributes:
        queries: (B, Q), which document each query belongs to.
        keys: (B, M).
    """

    queries: jax.Array
    keys: jax.Array

    def padded(self, num_queries: int, num_keys: int) -> SameDocument:
        """Return it for longer sequences."""
        return SameDocument(_padded(self.queries, num_queries), _padded(self.keys, num_keys))

    def block(self, block: ScoreBlock) -> jax.Array:
        """Return (B, 1, Q, M) of a block."""
        return SameDocument(*self.segments(block)).whole()

    def segments(self, block: ScoreBlock) -> tuple[jax.Array, jax.Array]:
        """Return which document each of a block's queries (B, Q) and keys (B, M) belongs to."""
        queries = _part(self.queries, block.first_query, block.num_queries)
        return queries, _part(self.keys, block.first_key, block.num_keys)

    def whole(self) -> jax.Array:
        """Return (B, 1, Q, M)."""
        return attention_mask_bias(self.queries[:, :, None] == self.keys[:, None, :])[:, None]


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["values"],
    meta_fields=["num_queries"],
)
@dataclass(frozen=True)
class ByDistance:
    """A learned bias of each head and distance.

    Attributes:
        values: (H, Q + M - 1), of distances (key minus query) from 1 - Q to M - 1.
        num_queries: Q.
    """

    values: jax.Array
    num_queries: int

    def padded(self, num_queries: int, num_keys: int) -> ByDistance:
        """Return it for longer sequences."""
        before = num_queries - self.num_queries
        after = num_queries + num_keys - 1 - before - self.values.shape[1]
        values = jnp.pad(self.values, ((0, 0), (before, after)))
        return ByDistance(values, num_queries)

    def block(self, block: ScoreBlock) -> jax.Array:
        """Return (1, H, Q, M) of a block."""
        first = block.first_key - block.first_query - block.num_queries + self.num_queries
        length = block.num_queries + block.num_keys - 1
        part = jax.lax.dynamic_slice_in_dim(self.values, first, length, axis=1)
        return spread_diagonals(part, block.num_queries, block.num_keys)[None]


Hiding = VisibleKeys | SameDocument
# Arrays that broadcast to the scores, or forms from which blocks are made.
Bias = jax.Array | Hiding | ByDistance
Biases = tuple[Bias, ...]


def as_arrays(biases: Biases) -> tuple[jax.Array, ...]:
    """Return the biases of sequences that are not split, each whole."""
    return tuple(
        bias.whole() if isinstance(bias, VisibleKeys | SameDocument) else cast("jax.Array", bias)
        for bias in biases
    )


def _padded(numbers: jax.Array, length: int) -> jax.Array:
    return jnp.pad(numbers, ((0, 0), (0, length - numbers.shape[1])))


def _part(numbers: jax.Array, first: jax.Array, length: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(numbers, first, length, axis=1)


def band_bias(
    num_queries: int, num_keys: int, *, is_causal: bool, window: int | jax.Array | None
) -> jax.Array | None:
    """Return (1, 1, Q, M) that hides the future and what lies `window` or more tokens back.

    None where nothing is hidden. Query i has the position of key i.
    """
    back = jnp.arange(num_queries)[:, None] - jnp.arange(num_keys)[None, :]
    visible = back >= 0 if is_causal else None
    if window is not None:
        near = back < window
        visible = near if visible is None else visible & near
    return None if visible is None else attention_mask_bias(visible)[None, None]


def row_biases(
    attention_mask: jax.Array | None, segment_ids: jax.Array | None
) -> tuple[Hiding, ...]:
    """Return what hides padding and other documents.

    Args:
        attention_mask: (B, T); 0 is padding.
        segment_ids: (B, T); which of a row's documents a token belongs to.
    """
    biases: tuple[Hiding, ...] = ()
    if attention_mask is not None:
        biases = (*biases, VisibleKeys(attention_mask))
    if segment_ids is not None:
        biases = (*biases, SameDocument(segment_ids, segment_ids))
    return biases


def default_positions(
    shape: tuple[int, ...], attention_mask: jax.Array | None, segment_ids: jax.Array | None
) -> jax.Array:
    """Return position ids (B, T), counted from 0 over what is not padding.

    They restart at 0 in every document of a packed row. Padding has position 0 before the first
    token and the last token's position after it, as in transformers.
    """
    places = jnp.broadcast_to(jnp.arange(shape[1]), shape)
    if segment_ids is not None:
        is_first = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)))
        return places - jax.lax.cummax(jnp.where(is_first, places, 0), axis=1)
    if attention_mask is None:
        return places
    counted = jnp.cumsum((attention_mask != 0).astype(jnp.int32), axis=1)
    return jnp.maximum(counted - 1, 0)
