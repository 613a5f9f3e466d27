"""Attention over sequences that are split over the context shards, by a ring.

The whole as other code sees it: arrays of any length, with gradients. The backward pass is written
out, since differentiating the loop would keep the scores of every turn.
Dims in this file: B batch, Q queries, M keys, H heads, G key-value groups, R heads per group, K
head dim.
Source: Liu et al. 2023, Ring Attention with Blockwise Transformers.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from redco_flow.models.attention.bias import Biases, ByDistance, Hiding, as_arrays
from redco_flow.models.attention.block import Result, Scoring, Shared
from redco_flow.models.attention.context import CONTEXT_AXIS, num_context_shards, on_context_shards
from redco_flow.models.attention.grouped import Window, attend_grouped, split_groups
from redco_flow.models.attention.ring_turns import Ring, backward, forward, plan_ring
from redco_flow.models.config import AttentionConfig
from redco_flow.models.random import check_num_elements

_EVERYWHERE = PartitionSpec()
_SEQUENCE = PartitionSpec(None, CONTEXT_AXIS)
_CHUNKS = PartitionSpec(CONTEXT_AXIS)


def ring_attend(
    config: AttentionConfig,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    biases: Biases = (),
    *,
    window: Window = None,
    dropout_keys: jax.Array | None = None,
    dropout_site: int = 0,
    is_balanced: bool = False,
) -> jax.Array:
    """Attend with queries (B, Q, H, K) over keys and values (B, M, G, K): (B, Q, H, K).

    Q and M are split over the mesh axis `context`; neither need be a multiple of it. Results are
    those of `attend_grouped`, but for rows that may see no key at all: those stay finite. Per
    layer and device a forward pass sends (n - 1) / n of the keys and values, a backward pass as
    much again and their gradients in float32.

    Args:
        biases: told by blocks.
        window: how many tokens back, itself included, a query looks; None: all.
        dropout_keys: raw keys (B, 2); None: no dropout of the weights.
        is_balanced: whether tokens stand in the order of `balanced_order`; positions, and what
            biases tell, are those of the text.

    Raises:
        ValueError: a bias is an array; or there are too many weights for their dropout.
    """
    num_shards = num_context_shards()
    learned, hiding = _sorted(biases)
    lengths = query.shape[1], key.shape[1]
    if dropout_keys is not None and config.dropout > 0:
        check_num_elements((config.num_heads, *lengths))
    scoring = Scoring(
        num_queries=lengths[0],
        num_keys=lengths[1],
        is_causal=config.is_causal,
        window=None if isinstance(window, jax.Array) else window,
        cap=config.cap,
        dropout_rate=config.dropout,
        dropout_site=dropout_site,
    )
    ring = plan_ring(scoring, num_shards, is_balanced=is_balanced)
    padded = ring.queries.length, ring.keys.length
    shared = Shared(
        learned=tuple(bias.padded(*padded) for bias in learned),
        hiding=tuple(bias.padded(*padded) for bias in hiding),
        window=window if isinstance(window, jax.Array) else None,
        dropout_keys=dropout_keys,
    )
    grouped = split_groups(query * config.scale, key.shape[2])
    heads = _attend(
        ring,
        _padded(grouped, padded[0]),
        _padded(key, padded[1]),
        _padded(value, padded[1]),
        shared,
    )
    return heads[:, : lengths[0]].reshape(query.shape)


def _sorted(biases: Biases) -> tuple[tuple[ByDistance, ...], tuple[Hiding, ...]]:
    """Return those with gradients, and the others."""
    learned: list[ByDistance] = []
    hiding: list[Hiding] = []
    for bias in biases:
        if isinstance(bias, ByDistance):
            learned.append(bias)
        elif isinstance(bias, jax.Array):
            raise ValueError(
                f"a bias is an array {bias.shape}; over {num_context_shards()} context shards "
                "biases are told by blocks: VisibleKeys, SameDocument or ByDistance of "
                "models.blockwise_bias."
            )
        else:
            hiding.append(bias)
    return tuple(learned), tuple(hiding)


def _padded(x: jax.Array, length: int) -> jax.Array:
    widths = [(0, 0), (0, length - x.shape[1]), *[(0, 0)] * (x.ndim - 2)]
    return jnp.pad(x, widths)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    ring: Ring, query: jax.Array, key: jax.Array, value: jax.Array, shared: Shared
) -> jax.Array:
    """Attend with queries (B, Q, G, R, K), whose lengths the shards divide: the same shape."""
    return _attend_forward(ring, query, key, value, shared)[0]


def _attend_forward(
    ring: Ring, query: jax.Array, key: jax.Array, value: jax.Array, shared: Shared
) -> tuple[jax.Array, tuple[Any, ...]]:
    on_shards = on_context_shards(
        partial(forward, ring),
        in_specs=(PartitionSpec(CONTEXT_AXIS), _SEQUENCE, _SEQUENCE, _SEQUENCE, _EVERYWHERE),
        out_specs=(_SEQUENCE, _CHUNKS, _CHUNKS),
    )
    heads, largest, normaliser = on_shards(_numbers(ring), query, key, value, shared)
    return heads, (query, key, value, shared, heads, largest, normaliser)


def _attend_backward(
    ring: Ring, saved: tuple[Any, ...], cotangent: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, Shared]:
    query, key, value, shared, heads, largest, normaliser = saved
    inner = jnp.einsum("bqgrk,bqgrk->bqgr", heads, cotangent, preferred_element_type=jnp.float32)
    result = Result(largest, normaliser, cotangent, inner)
    results = Result(_CHUNKS, _CHUNKS, _SEQUENCE, _SEQUENCE)  # type: ignore[arg-type]
    on_shards = on_context_shards(
        partial(backward, ring),
        in_specs=(
            PartitionSpec(CONTEXT_AXIS),
            _SEQUENCE,
            _SEQUENCE,
            _SEQUENCE,
            _EVERYWHERE,
            results,
        ),
        out_specs=(_SEQUENCE, _SEQUENCE, _SEQUENCE, _EVERYWHERE),
    )
    *gradients, of_learned = on_shards(_numbers(ring), query, key, value, shared, result)
    of_query, of_key, of_value = (
        gradient.astype(like.dtype)
        for gradient, like in zip(gradients, (query, key, value), strict=True)
    )
    # Nothing else that is shared is a number to be learned.
    of_shared = Shared(of_learned, None, None, None)  # type: ignore[arg-type]
    return of_query, of_key, of_value, of_shared


_attend.defvjp(_attend_forward, _attend_backward)


def _numbers(ring: Ring) -> jax.Array:
    """Return what tells each shard its number."""
    return jnp.arange(ring.keys.num_shards, dtype=jnp.int32)


def attend_sequence(
    config: AttentionConfig,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    biases: Biases = (),
    *,
    window: Window = None,
    dropout_keys: jax.Array | None = None,
    dropout_site: int = 0,
    is_balanced: bool = False,
) -> jax.Array:
    """Attend with queries (B, Q, H, K) over keys and values (B, M, G, K): (B, Q, H, K).

    See `attend_grouped` and `ring_attend` for the arguments; over several context shards biases
    are told by blocks, as `row_biases` does there.

    Raises:
        ValueError: a bias is whole where sequences are split.
    """
    if num_context_shards() == 1:
        return attend_grouped(
            config,
            query,
            key,
            value,
            as_arrays(biases),
            window=window,
            dropout_keys=dropout_keys,
            dropout_site=dropout_site,
        )
    return ring_attend(
        config,
        query,
        key,
        value,
        biases,
        window=window,
        dropout_keys=dropout_keys,
        dropout_site=dropout_site,
        is_balanced=is_balanced,
    )
