"""One context shard's work while keys and values travel round the ring.

It keeps its queries, works on the keys and values it holds, and sends them on meanwhile. XLA's
scores exist for one chunk of queries and one of keys at a time; a kernel, which keeps none, works
on all of a part at once. Backward it does so again, and the sums
of keys' and values' gradients travel with them, beginning beside their owner: neither way has a
turn too many. A pair of chunks of which nothing is seen (the future, or beyond a window) is not
computed, and where a fixed window ends the ring ends.
Dims in this file, of one shard: B batch, Q queries, M keys, G key-value groups, R heads per
group, K head dim. Everything but `forward`'s and `backward`'s arguments and results is in chunks,
with their number before B.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp

from redco_flow.models.attention import block as xla_block
from redco_flow.models.attention import splash_block
from redco_flow.models.attention.bias import ByDistance, ScoreBlock
from redco_flow.models.attention.block import (
    Gradients,
    Result,
    Running,
    Scoring,
    Shared,
    finish,
    is_needed,
    sink_gradients,
    start,
)
from redco_flow.models.attention.context import (
    CHUNK_LENGTH,
    CONTEXT_AXIS,
    SequenceCut,
    cut_sequence,
)

RingKernel = Literal["xla", "splash"]

_BLOCKS: dict[RingKernel, Any] = {"xla": xla_block, "splash": splash_block}

Carry = TypeVar("Carry")
# Keys and values, or their gradients.
Pair = tuple[jax.Array, jax.Array]
# The sums of queries' and learned biases' gradients.
Sums = tuple[jax.Array, tuple[ByDistance, ...]]


@dataclass(frozen=True)
class Ring:
    """The constants of one ring.

    Attributes:
        num_hops: how often keys and values are sent on.
        kernel: what works on a block.
    """

    scoring: Scoring
    queries: SequenceCut
    keys: SequenceCut
    num_hops: int
    kernel: RingKernel


def plan_ring(
    scoring: Scoring, num_shards: int, *, is_balanced: bool, kernel: RingKernel = "xla"
) -> Ring:
    """Cut both sequences and say how far keys and values must travel."""
    max_length = CHUNK_LENGTH if kernel == "xla" else None
    queries, keys = (
        cut_sequence(length, num_shards, is_balanced=is_balanced, max_length=max_length)
        for length in (scoring.num_queries, scoring.num_keys)
    )
    num_hops = num_shards - 1
    if scoring.is_causal and scoring.window is not None and not is_balanced:
        num_hops = min(num_hops, math.ceil((scoring.window - 1) / keys.shard_length))
    return Ring(scoring, queries, keys, num_hops, kernel)


def forward(
    ring: Ring,
    numbers: jax.Array,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    shared: Shared,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the heads (B, Q, G, R, K), and the softmax' maximum and normaliser in chunks.

    Args:
        numbers: this shard's, (1,).
        query: (B, Q, G, R, K).
        key, value: this shard's own, (B, M, G, K).
    """
    # Else a scan over layers takes the masks of all chunks, which every layer makes alike, out of
    # its loop and keeps them.
    numbers, query, key, value, shared = jax.lax.optimization_barrier(
        (numbers, query, key, value, shared)
    )
    (shard,) = numbers
    queries = ring.queries.chunks(query)
    work = partial(_absorb_held, ring, shared, shard, queries)

    def turn(carry: tuple[Running, Pair], hop: jax.Array) -> tuple[tuple[Running, Pair], None]:
        running, held = carry
        ahead = _send(ring, held, 1)
        return (work(running, held, hop), ahead), None

    begun = (
        jax.vmap(partial(start, sinks=shared.sinks))(queries),
        (ring.keys.chunks(key), ring.keys.chunks(value)),
    )
    running, held = _loop(turn, begun, 0, ring.num_hops)
    running = work(running, held, ring.num_hops)
    heads = ring.queries.joined(jax.vmap(finish)(running)).astype(value.dtype)
    return heads, running.largest, running.normaliser


def backward(
    ring: Ring,
    numbers: jax.Array,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    shared: Shared,
    result: Result,
) -> tuple[jax.Array, jax.Array, jax.Array, tuple[ByDistance, ...], jax.Array | None]:
    """Return the gradients of queries, keys, values, learned biases and sinks, float32.

    Those of the biases and sinks are summed over the shards. See `forward` for the arguments.

    Args:
        result: its maximum and normaliser in chunks, the others (B, Q, …).
    """
    (shard,) = numbers
    queries = ring.queries.chunks(query)
    results = result._replace(
        cotangent=ring.queries.chunks(result.cotangent), inner=ring.queries.chunks(result.inner)
    )
    pull = partial(_pull_held, ring, shared, shard, queries, results)

    def turn(
        carry: tuple[Sums, Pair, Pair], hop: jax.Array
    ) -> tuple[tuple[Sums, Pair, Pair], None]:
        sums, held, guests = carry
        ahead = _send(ring, held, 1)
        sums, added = pull(sums, held, hop)
        return (sums, ahead, _send(ring, _add(guests, added), 1)), None

    own = ring.keys.chunks(key), ring.keys.chunks(value)
    sums, home = pull(_zeros((queries, shared.learned)), own, 0)
    if ring.num_hops:
        begun = sums, _send(ring, own, 1), _zeros(own)
        sums, held, guests = _loop(turn, begun, 1, ring.num_hops)
        sums, added = pull(sums, held, ring.num_hops)
        home = _add(home, _send(ring, _add(guests, added), -ring.num_hops))
    of_query = ring.queries.joined(sums[0])
    of_key, of_value = map(ring.keys.joined, home)
    of_sinks = None
    if shared.sinks is not None:
        of_chunks = jax.vmap(partial(sink_gradients, shared.sinks))(results)
        of_sinks = jax.lax.psum(jnp.sum(of_chunks, axis=0), CONTEXT_AXIS)
    return of_query, of_key, of_value, jax.lax.psum(sums[1], CONTEXT_AXIS), of_sinks


def _absorb_held(
    ring: Ring,
    shared: Shared,
    shard: jax.Array,
    queries: jax.Array,
    running: Running,
    held: Pair,
    hop: int | jax.Array,
) -> Running:
    """Add the keys and values held after `hop` hops to every query's softmax."""
    owner = (shard - hop) % ring.keys.num_shards
    absorb = _BLOCKS[ring.kernel].absorb

    def for_query(_: None, own: tuple[Any, ...]) -> tuple[None, Running]:
        chunk, query, running = own

        def for_key(running: Running, theirs: tuple[Any, ...]) -> tuple[Running, None]:
            key_chunk, key, value = theirs
            block = _block(ring, shard, chunk, owner, key_chunk)
            absorbed = jax.lax.cond(
                is_needed(ring.scoring, shared, block),
                lambda: absorb(ring.scoring, shared, block, query, running, key, value),
                lambda: running,
            )
            return absorbed, None

        return None, jax.lax.scan(for_key, running, (_numbers(ring.keys), *held))[0]

    each = (_numbers(ring.queries), queries, running)
    found: Running = jax.lax.scan(for_query, None, each)[1]
    return found


def _pull_held(
    ring: Ring,
    shared: Shared,
    shard: jax.Array,
    queries: jax.Array,
    results: Result,
    sums: Sums,
    held: Pair,
    hop: int | jax.Array,
) -> tuple[Sums, Pair]:
    """Add the contributions of the keys and values held after `hop` hops; return gradients."""
    owner = (shard - hop) % ring.keys.num_shards
    pull_back = _BLOCKS[ring.kernel].pull_back

    def for_key(sums: Sums, theirs: tuple[Any, ...]) -> tuple[Sums, Pair]:
        key_chunk, key, value = theirs

        def for_query(carry: Any, own: tuple[Any, ...]) -> tuple[Any, jax.Array]:
            chunk, query, result, of_query = own
            block = _block(ring, shard, chunk, owner, key_chunk)
            found = jax.lax.cond(
                is_needed(ring.scoring, shared, block),
                lambda: pull_back(ring.scoring, shared, block, query, result, key, value),
                lambda: _no_gradients(query, key, value, shared),
            )
            added = (found.key, found.value, found.learned)
            return jax.tree.map(jnp.add, carry, added), of_query + found.query

        of_queries, of_learned = sums
        begun = (*_zeros((key, value)), of_learned)
        each = (_numbers(ring.queries), queries, results, of_queries)
        (*pair, of_learned), of_queries = jax.lax.scan(for_query, begun, each)
        return (of_queries, of_learned), tuple(pair)

    found: tuple[Sums, Pair] = jax.lax.scan(for_key, sums, (_numbers(ring.keys), *held))
    return found


def _block(
    ring: Ring, shard: jax.Array, query_chunk: jax.Array, owner: jax.Array, key_chunk: jax.Array
) -> ScoreBlock:
    """Return where a chunk of a shard's queries meets one of another shard's keys."""
    return ScoreBlock(
        first_query=ring.queries.first(shard, query_chunk),
        num_queries=ring.queries.chunk_length,
        first_key=ring.keys.first(owner, key_chunk),
        num_keys=ring.keys.chunk_length,
    )


def _numbers(cut: SequenceCut) -> jax.Array:
    """Return the numbers of a shard's chunks."""
    return jnp.arange(cut.num_chunks, dtype=jnp.int32)


def _loop(
    turn: Callable[[Carry, jax.Array], tuple[Carry, None]], carry: Carry, first: int, stop: int
) -> Carry:
    """Run a loop over the numbers from `first` to before `stop`; none at all for no numbers."""
    if first >= stop:
        return carry
    found: Carry = jax.lax.scan(turn, carry, jnp.arange(first, stop, dtype=jnp.int32))[0]
    return found


def _send(ring: Ring, pair: Pair, distance: int) -> Pair:
    """Give to the shard `distance` further round the ring; return what comes."""
    shards = range(ring.keys.num_shards)
    route = [(shard, (shard + distance) % len(shards)) for shard in shards]
    sent: Pair = jax.lax.ppermute(pair, CONTEXT_AXIS, route)
    return sent


def _add(one: Pair, other: Pair) -> Pair:
    return one[0] + other[0], one[1] + other[1]


def _no_gradients(query: jax.Array, key: jax.Array, value: jax.Array, shared: Shared) -> Gradients:
    of_query, of_key, of_value = _zeros((query, key, value))
    return Gradients(of_query, of_key, of_value, _zeros(shared.learned))


def _zeros(tree: Any) -> Any:
    """Return sums before anything is added, float32."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), tree)
