"""A ring whose blocks are TPUs' splash attention, in Pallas' interpreter, against XLA's ring."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from redco_flow import Deployer
from redco_flow.models.attention.bias import row_biases
from redco_flow.models.attention.context import SequenceOrder
from redco_flow.models.attention.grouped import attend_grouped
from redco_flow.models.attention.ring import ring_attend
from redco_flow.models.layer_config import AttentionConfig

BATCH, LENGTH, HEAD_DIM = 2, 40, 6
PADDED = (np.arange(LENGTH) < [[LENGTH], [23]]).astype(np.int32)
LEFT_PADDED = PADDED[:, ::-1]
SEGMENTS = np.repeat([[1, 2, 3, 0], [7, 8, 9, 0]], [3, 22, 11, 4], axis=1)
# Two shards of 540 tokens, which take two of the kernel's blocks and do not fill them.
LONG = 1080


def config_of(num_kv_heads: int = 2, **options: Any) -> AttentionConfig:
    return AttentionConfig(2, num_kv_heads, HEAD_DIM, HEAD_DIM**-0.5, **options)


class Kind(NamedTuple):
    """An attention, and what its rows hide."""

    config: AttentionConfig = config_of(1)
    mask: np.ndarray | None = None
    segments: np.ndarray | None = None
    window: Any = None
    is_balanced: bool = False
    num_shards: int = 4
    length: int = LENGTH


KINDS = {
    "of several blocks, balanced, a window": Kind(
        num_shards=2, length=2 * LONG, is_balanced=True, window=700
    ),
    "a bidirectional window, a length that the shards do not divide": Kind(
        config_of(is_causal=False), window=7, length=37, num_shards=2
    ),
    "over another, padded sequence": Kind(
        config_of(is_causal=False), PADDED[:, 5:28], num_shards=2
    ),
    "packed, padded, a window of a layer's own, capped, balanced": Kind(
        config_of(1, cap=1.5), PADDED, SEGMENTS, jnp.asarray(7), is_balanced=True, num_shards=2
    ),
}


def draw(*shape: int, seed: int = 0) -> jax.Array:
    numbers = np.random.default_rng(seed).standard_normal(shape)
    return jnp.asarray(numbers, jnp.float32)


def attended(kind: Kind, dtype: Any = jnp.float32, **options: Any) -> Any:
    """Return results and gradients of the queries that see a key."""
    num_keys = kind.length if kind.mask is None else kind.mask.shape[1]
    num_groups = kind.config.num_kv_heads
    heads = (
        draw(BATCH, kind.length, 2, HEAD_DIM, seed=1).astype(dtype),
        draw(BATCH, num_keys, num_groups, HEAD_DIM, seed=2).astype(dtype),
        draw(BATCH, num_keys, num_groups, HEAD_DIM, seed=3).astype(dtype),
    )
    sees = np.ones((BATCH, kind.length))
    if kind.config.is_causal and kind.mask is not None:
        sees = kind.mask
    counted = draw(*heads[0].shape, seed=4) * sees[:, :, None, None]
    order = SequenceOrder(is_balanced=kind.is_balanced)

    def total(*heads: jax.Array) -> tuple[jax.Array, jax.Array]:
        # Made here, so that they are told by blocks where sequences are split.
        biases = row_biases(kind.mask, kind.segments)
        found = ring_attend(
            kind.config, *map(order.arranged, heads), biases,
            window=kind.window, is_balanced=kind.is_balanced, **options,
        )  # fmt: skip
        found = order.restored(found) * counted
        return jnp.sum(found), found

    mesh = jax.make_mesh((kind.num_shards,), ("context",), axis_types=(AxisType.Auto,))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        given = jax.device_put(heads, everywhere)
        return jax.jit(jax.grad(total, argnums=(0, 1, 2), has_aux=True))(*given)


def by_splash(kind: Kind, **options: Any) -> Any:
    windows = (7, 30) if isinstance(kind.window, jax.Array) else ()
    return attended(kind, kernel="splash", windows=windows, is_interpreted=True, **options)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
def test_results_and_gradients_are_those_of_xlas_ring(kind):
    """Forward to 1e-5 and gradients to 1e-4, as float32 sums in another order are."""
    expected = attended(kind)

    found = by_splash(kind)

    np.testing.assert_allclose(found[1], expected[1], rtol=0, atol=1e-5)
    for one, other in zip(found[0], expected[0], strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-4)


@pytest.mark.slow
def test_half_precision_loses_no_more_than_xlas_ring():
    """Grouped queries, of rows padded on the left: their first see no key."""
    kind = Kind(mask=LEFT_PADDED, num_shards=2)
    exact, alone = attended(kind), attended(kind, jnp.bfloat16)

    found = by_splash(kind, dtype=jnp.bfloat16)

    for one, other, true in zip(*map(jax.tree.leaves, (found, alone, exact)), strict=True):
        error, allowed = (np.abs(np.float32(x) - true).max() for x in (one, other))
        assert error <= 2 * allowed


@pytest.mark.slow
def test_every_shard_attends_with_its_own_rows_and_heads():
    """Three rows, which the shards do not divide."""
    config = AttentionConfig(4, 2, HEAD_DIM, HEAD_DIM**-0.5)
    heads = draw(3, 12, 4, HEAD_DIM), draw(3, 12, 2, HEAD_DIM), draw(3, 12, 2, HEAD_DIM, seed=1)
    biases = row_biases(None, np.repeat([[1, 2]], [5, 7], axis=1).repeat(3, axis=0))
    deployer = Deployer(2, num_context_shards=2, num_fsdp_shards=2, devices=jax.devices()[:8])
    heads = jax.device_put(heads, deployer.named_sharding())

    def by_ring(*operands: Any) -> jax.Array:
        return ring_attend(*operands, kernel="splash", is_interpreted=True)

    def gradients(attend: Callable[..., jax.Array]) -> Callable[..., Any]:
        def total(*heads: jax.Array) -> jax.Array:
            found = attend(config, *heads, biases)
            return jnp.sum(found * jnp.cos(jnp.arange(found.size)).reshape(found.shape))

        return jax.jit(deployer.on_mesh(jax.value_and_grad(total, argnums=(0, 1, 2))))

    found, expected = (gradients(attend)(*heads) for attend in (by_ring, attend_grouped))

    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-4)
