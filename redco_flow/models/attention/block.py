"""One block of queries over one block of keys: what it adds to attention, forward and backward.

Softmax is built up block by block from its running maximum and sum (float32), so that the scores of
no more than one block exist at a time.
Dims in this file: B batch, Q queries, M keys, G key-value groups, R heads per group, K head dim.
Source: Dao et al. 2022, FlashAttention, algorithms 1 and 4.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from redco_flow.engine.random import keep_factors
from redco_flow.models.attention.bias import ByDistance, Hiding, ScoreBlock
from redco_flow.models.attention.grouped import cap
from redco_flow.models.numerics import attention_mask_bias, wide_einsum

# Padding that only fills up blocks: below any sum of MASKED, and finite.
NEVER = -1e30


@dataclass(frozen=True)
class Scoring:
    """The constants of an attention.

    Attributes:
        num_queries, num_keys: of the whole; what blocks have beyond only fills them up.
        is_causal: query i sees no key beyond i.
        window: how many tokens back, itself included, a query looks; None: all, or as many as
            `Shared.window` says.
        cap: scores are squeezed into (-cap, cap) by tanh.
        dropout_rate, dropout_site: of the weights; see `dropout`.
        windows: the values that `Shared.window` may have; what XLA computes need not know them.
        is_interpreted: whether a kernel runs in Pallas' interpreter, on any device: for tests.
    """

    num_queries: int
    num_keys: int
    is_causal: bool
    window: int | None
    cap: float | None
    dropout_rate: float
    dropout_site: int
    windows: tuple[int, ...] = ()
    is_interpreted: bool = False


class Shared(NamedTuple):
    """The arrays that all blocks read.

    Attributes:
        learned: biases with gradients.
        hiding: what rows hide.
        window: see `Scoring`, where layers differ.
        dropout_keys: raw keys (B, 2); None: no dropout.
        sinks: each head's score of no token (G, R), float32; None: there are none.
    """

    learned: tuple[ByDistance, ...]
    hiding: tuple[Hiding, ...]
    window: jax.Array | None
    dropout_keys: jax.Array | None
    sinks: jax.Array | None = None


class Running(NamedTuple):
    """A softmax over the keys so far, float32.

    Attributes:
        total: (B, G, R, Q, K), values weighted by exponentials.
        largest: (B, G, R, Q), the largest score.
        normaliser: (B, G, R, Q), the exponentials' sum; each is of a score minus the largest.
    """

    total: jax.Array
    largest: jax.Array
    normaliser: jax.Array


class Result(NamedTuple):
    """The forward pass's results for a block of queries, which the backward pass reads.

    Attributes:
        largest, normaliser: of `Running`, in the end.
        cotangent: of the heads, (B, Q, G, R, K).
        inner: (B, Q, G, R), float32: the heads times their cotangent, summed.
    """

    largest: jax.Array
    normaliser: jax.Array
    cotangent: jax.Array
    inner: jax.Array


class Gradients(NamedTuple):
    """Of a block's inputs, shaped like them; float32."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    learned: tuple[ByDistance, ...]


def start(query: jax.Array, sinks: jax.Array | None = None) -> Running:
    """Return the softmax over no key but the sinks (G, R), for queries (B, Q, G, R, K)."""
    batch, num_queries, *heads, head_dim = query.shape
    rows = (batch, *heads, num_queries)
    nothing = jnp.zeros(rows, jnp.float32)
    return Running(
        total=jnp.zeros((*rows, head_dim), jnp.float32),
        largest=nothing + (NEVER if sinks is None else sinks[..., None]),
        normaliser=nothing if sinks is None else nothing + 1,
    )


def sink_gradients(sinks: jax.Array, result: Result) -> jax.Array:
    """Return the sinks' gradients (G, R) of a block of queries."""
    weights = jnp.exp(sinks[..., None] - result.largest) / safe(result.normaliser)
    return -jnp.einsum("bgrq,bqgr->gr", weights, result.inner)


def finish(running: Running) -> jax.Array:
    """Return the heads (B, Q, G, R, K), float32."""
    heads = running.total / safe(running.normaliser)[..., None]
    return jnp.moveaxis(heads, 3, 1)


def safe(normaliser: jax.Array) -> jax.Array:
    """Return 1 for a row that met no key, which can only fill up its block."""
    return jnp.where(normaliser > 0, normaliser, 1.0)


def is_needed(scoring: Scoring, shared: Shared, block: ScoreBlock) -> jax.Array:
    """Say whether any query of a block may see any of its keys."""
    needed = block.first_key < scoring.num_keys
    if scoring.is_causal:
        needed &= block.first_key < block.first_query + block.num_queries
    window = _window(scoring, shared)
    if window is not None:
        needed &= block.first_query - (block.first_key + block.num_keys - 1) < window
    return needed


def absorb(
    scoring: Scoring,
    shared: Shared,
    block: ScoreBlock,
    query: jax.Array,
    running: Running,
    key: jax.Array,
    value: jax.Array,
) -> Running:
    """Bring keys and values (B, M, G, K) into the softmax of queries (B, Q, G, R, K)."""
    scores = _scores(scoring, shared, block, query, key, shared.learned)
    largest = jnp.maximum(running.largest, jnp.max(scores, axis=-1))
    weights = jnp.exp(scores - largest[..., None])
    shrunk = jnp.exp(running.largest - largest)
    normaliser = running.normaliser * shrunk + jnp.sum(weights, axis=-1)
    factors = _dropout_factors(scoring, shared, block, key.shape[2], query.shape[3])
    if factors is not None:
        weights = weights * factors
    added = wide_einsum("bgrqm,bmgk->bgrqk", weights.astype(value.dtype), value)
    return Running(running.total * shrunk[..., None] + added, largest, normaliser)


def pull_back(
    scoring: Scoring,
    shared: Shared,
    block: ScoreBlock,
    query: jax.Array,
    result: Result,
    key: jax.Array,
    value: jax.Array,
) -> Gradients:
    """Return what a block adds to the gradients; its scores are computed again."""

    def score(query: jax.Array, key: jax.Array, learned: tuple[ByDistance, ...]) -> jax.Array:
        return _scores(scoring, shared, block, query, key, learned)

    scores, pull_scores = jax.vjp(score, query, key, shared.learned)
    weights = jnp.exp(scores - result.largest[..., None]) / safe(result.normaliser)[..., None]
    of_weights = wide_einsum("bqgrk,bmgk->bgrqm", result.cotangent, value)
    factors = _dropout_factors(scoring, shared, block, key.shape[2], query.shape[3])
    kept = weights if factors is None else weights * factors
    if factors is not None:
        of_weights = of_weights * factors
    of_value = wide_einsum("bgrqm,bqgrk->bmgk", kept.astype(value.dtype), result.cotangent)
    inner = jnp.moveaxis(result.inner, 1, -1)[..., None]
    of_scores = weights * (of_weights - inner)
    of_query, of_key, of_learned = pull_scores(of_scores)
    return Gradients(of_query.astype(jnp.float32), of_key.astype(jnp.float32), of_value, of_learned)


def _scores(
    scoring: Scoring,
    shared: Shared,
    block: ScoreBlock,
    query: jax.Array,
    key: jax.Array,
    learned: tuple[ByDistance, ...],
) -> jax.Array:
    """Return (B, G, R, Q, M), float32."""
    scores = cap(wide_einsum("bqgrk,bmgk->bgrqm", query, key), scoring.cap)
    num_groups = key.shape[2]
    for bias in (*learned, *shared.hiding):
        scores = scores + _by_group(bias.block(block), num_groups)
    band = _band(scoring, shared, block)
    if band is not None:
        scores = scores + attention_mask_bias(band)
    return jnp.where(block.keys < scoring.num_keys, scores, NEVER)


def _by_group(bias: jax.Array, num_groups: int) -> jax.Array:
    """View (B, H or 1, Q, M) as (B, G, R, Q, M) or (B, 1, 1, Q, M)."""
    batch, num_heads, *rest = bias.shape
    return bias.reshape(batch, min(num_heads, num_groups), -1, *rest)


def _band(scoring: Scoring, shared: Shared, block: ScoreBlock) -> jax.Array | None:
    """Return (Q, M): what lies neither in the future nor too far back; None: everything."""
    back = block.queries[:, None] - block.keys[None, :]
    visible = back >= 0 if scoring.is_causal else None
    window = _window(scoring, shared)
    if window is None:
        return visible
    near = back < window
    return near if visible is None else visible & near


def _window(scoring: Scoring, shared: Shared) -> int | jax.Array | None:
    return scoring.window if shared.window is None else shared.window


def _dropout_factors(
    scoring: Scoring, shared: Shared, block: ScoreBlock, num_groups: int, group_size: int
) -> jax.Array | None:
    """Return 0 or 1 / (1 - rate) for each weight, (B, G, R, Q, M), as on one device."""
    keys, rate = shared.dropout_keys, scoring.dropout_rate
    if keys is None or rate == 0:
        return None
    heads = jnp.arange(num_groups * group_size, dtype=jnp.uint32)
    heads = heads.reshape(num_groups, group_size, 1, 1)
    queries, key_numbers = (x.astype(jnp.uint32) for x in (block.queries, block.keys))
    rows = heads * np.uint32(scoring.num_queries) + queries[:, None]
    places = rows * np.uint32(scoring.num_keys) + key_numbers
    return keep_factors(places, rate, keys, scoring.dropout_site)
