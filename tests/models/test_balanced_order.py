"""The order of a causal model's tokens on the context shards: equal work, the same results."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from redco_flow.models.attention.bias import ScoreBlock, row_biases
from redco_flow.models.attention.block import Scoring, Shared, is_needed
from redco_flow.models.attention.context import (
    SequenceOrder,
    balanced_where_possible,
    can_balance,
    cut_sequence,
)
from redco_flow.models.attention.grouped import attend_grouped
from redco_flow.models.attention.ring import ring_attend
from redco_flow.models.layer_config import AttentionConfig

CONFIG = AttentionConfig(4, 2, 6, 6**-0.5)


def on_context(num_shards: int, function: Callable[..., Any], *inputs: Any) -> Any:
    mesh = jax.make_mesh((num_shards,), ("context",), axis_types=(AxisType.Auto,))
    everywhere = NamedSharding(mesh, PartitionSpec())
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.jit(function)(*jax.device_put(inputs, everywhere))


def draw(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(sum(shape)).standard_normal(shape), jnp.float32)


def test_each_shard_holds_a_part_from_the_front_and_one_from_the_end():
    places = on_context(4, SequenceOrder(is_balanced=True).arranged, jnp.arange(8)[None])

    np.testing.assert_array_equal(places, [[0, 7, 1, 6, 2, 5, 3, 4]])


@pytest.mark.parametrize("num_shards", [2, 4, 8])
def test_what_was_arranged_is_restored_with_its_gradient(num_shards):
    order = SequenceOrder(is_balanced=True)
    x, weights = draw(2, 32, 3), draw(2, 32, 3)

    def weighed(x: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
        restored = order.restored(order.arranged(x))
        return jnp.sum(restored * weights), restored

    gradient, found = on_context(num_shards, jax.grad(weighed, has_aux=True), x, weights)

    np.testing.assert_array_equal(found, x)
    np.testing.assert_array_equal(gradient, weights)


def test_a_length_that_would_need_filling_keeps_the_texts_order():
    assert can_balance(16, 4)
    assert not can_balance(12, 4)

    orders = [on_context(4, lambda n=n: balanced_where_possible(n)) for n in (16, 12)]

    assert orders == [SequenceOrder(is_balanced=True), SequenceOrder()]
    assert balanced_where_possible(16) == SequenceOrder()


def pairs_of_chunks(length: int, num_shards: int, *, is_balanced: bool) -> list[list[int]]:
    """Count the pairs of chunks that each shard works on, turn by turn, under a causal mask."""
    cut = cut_sequence(length, num_shards, is_balanced=is_balanced)
    scoring = Scoring(length, length, True, None, None, 0.0, 0)

    def count(shard: int, owner: int) -> int:
        places = [(cut.first(shard, q), cut.first(owner, k)) for q, k in np.ndindex(chunks, chunks)]
        blocks = [ScoreBlock(q, cut.chunk_length, k, cut.chunk_length) for q, k in places]
        return sum(bool(is_needed(scoring, Shared((), (), None, None), b)) for b in blocks)

    chunks, shards = cut.num_chunks, range(num_shards)
    return [[count(shard, (shard - hop) % num_shards) for shard in shards] for hop in shards]


def test_in_every_turn_all_shards_have_the_same_to_do():
    """Else the last one has twice the mean, and the others wait."""
    balanced = pairs_of_chunks(64, 4, is_balanced=True)
    plain = pairs_of_chunks(64, 4, is_balanced=False)

    assert all(len(set(turn)) == 1 for turn in balanced)
    # Two chunks of a half's length each: of 4 pairs 3 beside the diagonal, then 2 of 4.
    assert [turn[0] for turn in balanced] == [3, 2, 2, 2]
    assert plain == [[1, 1, 1, 1], [0, 1, 1, 1], [0, 0, 1, 1], [0, 0, 0, 1]]


@pytest.mark.parametrize(
    ("num_shards", "length", "window"), [(2, 16, None), (4, 16, jnp.asarray(6))]
)
def test_a_ring_in_balanced_order_attends_as_one_device_does(num_shards, length, window):
    """Masks and documents are told in the text's order."""
    mask = np.ones((2, length), np.int32)
    mask[1, 11:] = 0
    segments = np.repeat([[1, 2, 3]], [3, 7, length - 10], axis=1).repeat(2, axis=0)
    order = SequenceOrder(is_balanced=True)

    def by_ring(*heads: jax.Array) -> jax.Array:
        arranged = map(order.arranged, heads)
        biases = row_biases(mask, segments)
        return order.restored(
            ring_attend(CONFIG, *arranged, biases, window=window, is_balanced=True)
        )

    def on_one(*heads: jax.Array) -> jax.Array:
        return attend_grouped(CONFIG, *heads, row_biases(mask, segments), window=window)

    def gradients(function: Any, *heads: jax.Array) -> Any:
        # Padding's own queries see padding only, and no result holds them.
        return jax.grad(
            lambda *x: jnp.sum(jnp.sin(function(*x)) * mask[..., None, None]), (0, 1, 2)
        )(*heads)

    heads = draw(2, length, 4, 6), draw(2, length, 2, 6), draw(2, length, 2, 6) + 1

    found = on_context(num_shards, partial(gradients, by_ring), *heads)

    for one, other in zip(found, jax.jit(partial(gradients, on_one))(*heads), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5 * np.abs(other).max())


@pytest.mark.slow
@pytest.mark.parametrize("decoder", ["mixtral"], indirect=True)
def test_a_mixtures_router_logits_are_in_the_texts_order(decoder):
    ids = np.random.default_rng(0).integers(2, 61, (2, 8))
    apply = partial(decoder.module.apply_with_router, decoder.config)

    found = on_context(4, apply, decoder.params, ids)

    for one, other in zip(found, jax.jit(apply)(decoder.params, ids), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5 * np.abs(other).max())
