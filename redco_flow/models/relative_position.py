"""T5's relative position bias: one learned number per head and bucket of distances.

Buckets are computed on the host, once per shape; the bias of every (query, key) pair is laid
out from one vector per head by reshapes, so that its gradient is sums and no scatter.
Dims in this file: H heads, Q queries, M keys.
Source: Raffel et al. 2020, section 2.1; buckets as in Mesh TensorFlow and transformers.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np


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
