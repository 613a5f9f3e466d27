"""Attention by a ring over two to four devices, against the same on one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from redco_flow.models.attention.bias import ByDistance, distance_bias, row_biases, spread_diagonals
from redco_flow.models.attention.grouped import attend_grouped
from redco_flow.models.attention.ring import attend_sequence, ring_attend
from redco_flow.models.layer_config import AttentionConfig
from tests.engine.traffic import read_collectives

BATCH, LENGTH, HEAD_DIM = 2, 12, 6
PADDED = np.array([[1] * 12, [1] * 7 + [0] * 5])
SEGMENTS = np.repeat([[1, 2, 3, 0], [1, 2, 3, 0]], [3, 5, 2, 2], axis=1)

AttendFn = Callable[..., jax.Array]


def config_of(num_kv_heads: int = 4, **options: Any) -> AttentionConfig:
    return AttentionConfig(4, num_kv_heads, HEAD_DIM, HEAD_DIM**-0.5, **options)


class Kind(NamedTuple):
    """An attention, and what its rows hide."""

    config: AttentionConfig
    mask: np.ndarray | None = None
    segments: np.ndarray | None = None
    window: Any = None
    has_sinks: bool = False


KINDS = {
    "a window": Kind(config_of(2), window=4),
    "a window as long as one shard": Kind(config_of(), window=2),
    "a window of a layer's own": Kind(config_of(), window=jnp.asarray(5)),
    "capped scores": Kind(config_of(2, cap=1.5)),
    "sinks and a window": Kind(config_of(2), window=4, has_sinks=True),
    "packed, bidirectional and padded": Kind(config_of(is_causal=False), PADDED, SEGMENTS),
    "dropout": Kind(config_of(2, dropout=0.3), PADDED),
}


def draw(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(sum(shape)).standard_normal(shape), jnp.float32)


def on_context(num_shards: int, function: Callable[..., Any], *inputs: Any) -> Any:
    mesh = jax.make_mesh((num_shards,), ("context",), axis_types=(AxisType.Auto,))
    everywhere = NamedSharding(mesh, PartitionSpec())
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.jit(function)(*jax.device_put(inputs, everywhere))


def with_gradients(function: Callable[..., jax.Array]) -> Callable[..., Any]:
    """Return the result and the gradients of a sum in which every element counts otherwise."""

    def weighed(*inputs: Any) -> tuple[jax.Array, jax.Array]:
        found = function(*inputs)
        return jnp.sum(found * jnp.cos(jnp.arange(found.size)).reshape(found.shape)), found

    def both(*inputs: Any) -> Any:
        numbers = tuple(range(len(inputs)))
        gradients, found = jax.grad(weighed, argnums=numbers, has_aux=True)(*inputs)
        return found, gradients

    return both


def assert_near(found: Any, expected: Any) -> None:
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5 * np.abs(other).max())


def attention_of(kind: Kind) -> AttendFn:
    def function(
        query: jax.Array, key: jax.Array, value: jax.Array, sinks: jax.Array | None = None
    ) -> jax.Array:
        # Made here, so that they are told by blocks where sequences are split.
        biases = row_biases(kind.mask, kind.segments)
        keys = jax.random.key_data(jax.random.split(jax.random.key(3), BATCH))
        return attend_sequence(
            kind.config, query, key, value, biases,
            window=kind.window, dropout_keys=keys, dropout_site=2, sinks=sinks,
        )  # fmt: skip

    return with_gradients(function)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
def test_a_ring_attends_as_one_device_does(kind):
    heads = kind.config.num_kv_heads
    inputs = (
        draw(BATCH, LENGTH, 4, HEAD_DIM),
        *(draw(BATCH, LENGTH, heads, HEAD_DIM) + shift for shift in (0, 1)),
        *([draw(4)] * kind.has_sinks),
    )

    found = on_context(4, attention_of(kind), *inputs)

    assert_near(found, jax.jit(attention_of(kind))(*inputs))


@pytest.mark.parametrize(("num_shards", "num_queries", "num_keys"), [(4, 3, 3), (4, 10, 7)])
def test_lengths_need_not_be_multiples_of_the_shards(num_shards, num_queries, num_keys):
    """Some shards hold nothing but filling; keys may be another sequence's."""
    attention = attention_of(Kind(config_of(2, is_causal=num_queries == num_keys)))
    inputs = draw(BATCH, num_queries, 4, HEAD_DIM), *[draw(BATCH, num_keys, 2, HEAD_DIM)] * 2

    found = on_context(num_shards, attention, *inputs)

    assert_near(found, jax.jit(attention)(*inputs))


def test_long_shards_are_worked_off_in_chunks():
    """1030 keys per shard are more than are looked at at once."""
    kind = Kind(AttentionConfig(1, 1, 4, 0.5), window=700)
    inputs = [draw(1, 2060, 1, 4) + shift for shift in range(3)]

    found = on_context(2, attention_of(kind), *inputs)

    assert_near(found, jax.jit(attention_of(kind))(*inputs))


@pytest.mark.parametrize(("is_causal", "num_queries"), [(True, 13), (False, LENGTH)])
def test_a_learned_bias_of_distances_gets_its_gradient_from_every_shard(is_causal, num_queries):
    kind = {"bidirectional": not is_causal, "max_distance": 9}
    plain = AttentionConfig(4, 4, HEAD_DIM, 1.0, is_causal=is_causal)

    def on_one(table: jax.Array, *heads: jax.Array) -> jax.Array:
        values = distance_bias(table, np.arange(1 - num_queries, num_queries), **kind)
        bias = spread_diagonals(values, num_queries, num_queries)[None]
        return attend_grouped(plain, *heads, (bias,))

    def by_ring(table: jax.Array, *heads: jax.Array) -> jax.Array:
        values = distance_bias(table, np.arange(1 - num_queries, num_queries), **kind)
        return ring_attend(plain, *heads, (ByDistance(values, num_queries),))

    inputs = draw(8, 4), *(draw(BATCH, num_queries, 4, HEAD_DIM) + shift for shift in range(3))

    found = on_context(4, with_gradients(by_ring), *inputs)

    assert_near(found, jax.jit(with_gradients(on_one))(*inputs))


def test_a_row_that_sees_no_key_stays_finite():
    mask = np.zeros((BATCH, LENGTH), np.int32)
    inputs = [draw(BATCH, LENGTH, 4, HEAD_DIM)] * 3

    found = on_context(4, attention_of(Kind(config_of(), mask)), *inputs)

    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(found))


def test_half_precision_loses_no_more_than_on_one_device():
    kind = Kind(config_of(2))
    wide = [draw(BATCH, LENGTH, heads, HEAD_DIM) for heads in (4, 2, 2)]
    narrow = [x.astype(jnp.bfloat16) for x in wide]
    exact = jax.jit(attention_of(kind))(*(x.astype(jnp.float32) for x in narrow))

    found = on_context(4, attention_of(kind), *narrow)

    alone = jax.jit(attention_of(kind))(*narrow)
    for one, other, true in zip(*map(jax.tree.leaves, (found, alone, exact)), strict=True):
        assert one.dtype == jnp.bfloat16
        error, allowed = (np.abs(np.float32(x) - true).max() for x in (one, other))
        assert error <= 2 * allowed


def sent(num_shards: int, kind: Kind, num_kv_heads: int) -> float:
    """Bytes that one device sends in a forward and a backward pass."""
    mesh = jax.make_mesh((num_shards,), ("context",), axis_types=(AxisType.Auto,))
    split = NamedSharding(mesh, PartitionSpec(None, "context"))
    shapes = [
        jax.ShapeDtypeStruct((BATCH, 32, heads, HEAD_DIM), jnp.float32, sharding=split)
        for heads in (4, num_kv_heads, num_kv_heads)
    ]
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        jitted = jax.jit(attention_of(kind), out_shardings=split)
        collectives = read_collectives(jitted.lower(*shapes).compile().as_text())
    assert {one.kind for one in collectives} == {"collective-permute"}
    return sum(one.wire_bytes for one in collectives)


# Over two the compiler sees that both passes send the same, and sends it once.
@pytest.mark.parametrize(("num_shards", "num_kv_heads"), [(4, 4), (8, 2)])
def test_keys_and_values_go_round_once_forward_and_with_their_gradients_backward(
    num_shards, num_kv_heads
):
    both = 2 * BATCH * 32 * num_kv_heads * HEAD_DIM * 4
    once = (num_shards - 1) / num_shards * both

    found = sent(num_shards, Kind(config_of(num_kv_heads)), num_kv_heads)

    assert found == 3 * once


def test_a_window_ends_the_ring_early():
    """Of eight shards of four tokens a window of nine reaches back to two, one of ten to three."""
    part = 2 * BATCH * 4 * 4 * HEAD_DIM * 4

    assert sent(8, Kind(config_of(), window=9), 4) == 3 * 2 * part
    assert sent(8, Kind(config_of(), window=10), 4) == 3 * 3 * part


def test_scanned_layers_keep_no_scores_and_no_masks():
    """JAX takes out of a scan what is the same in every layer: here it must not."""
    length, config = 8192, AttentionConfig(1, 1, 4, 0.5)
    mesh = jax.make_mesh((2,), ("context",), axis_types=(AxisType.Auto,))
    split = NamedSharding(mesh, PartitionSpec(None, "context"))
    shape = jax.ShapeDtypeStruct((1, length, 1, 4), jnp.float32, sharding=split)

    def layers(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        def layer(query: jax.Array, _: None) -> tuple[jax.Array, None]:
            return ring_attend(config, query, key, value), None

        return jnp.sum(jnp.sin(jax.lax.scan(layer, query, None, length=3)[0]))

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        compiled = jax.jit(jax.grad(layers)).lower(*[shape] * 3).compile()

    scores_of_one_shard = 4 * (length // 2) * length
    assert compiled.memory_analysis().temp_size_in_bytes < scores_of_one_shard / 3


def test_biases_that_are_arrays_are_refused():
    heads = [draw(BATCH, LENGTH, 4, HEAD_DIM)] * 3
    whole = (jnp.zeros((1, 1, LENGTH, LENGTH)),)

    with pytest.raises(ValueError, match=r"given by blocks: VisibleKeys"):
        on_context(2, partial(ring_attend, config_of(), biases=whole), *heads)


def test_more_weights_than_dropout_can_count_are_refused():
    heads = [jax.ShapeDtypeStruct((1, 2**15, 4, HEAD_DIM), jnp.float32)] * 3
    keys = jax.ShapeDtypeStruct((1, 2), jnp.uint32)

    with pytest.raises(ValueError, match=r"2\^32 elements or more"):
        jax.eval_shape(
            lambda *heads, keys: ring_attend(config_of(dropout=0.1), *heads, dropout_keys=keys),
            *heads,
            keys=keys,
        )
