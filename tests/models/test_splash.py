"""Splash attention in Pallas' interpreter, against the attention that forms all scores."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from redco_flow import Deployer
from redco_flow.models.attention.bias import row_biases
from redco_flow.models.attention.grouped import attend_grouped
from redco_flow.models.attention.splash import block_length, splash_attend
from redco_flow.models.layer_config import AttentionConfig

# Two blocks of 384, which it does not fill.
BATCH, LENGTH, HEAD_DIM = 2, 600, 6
PADDED = (np.arange(LENGTH) < [[LENGTH], [401]]).astype(np.int32)
LEFT_PADDED = PADDED[:, ::-1]
SEGMENTS = np.repeat([[1, 2, 3, 0], [7, 8, 9, 0]], [30, 400, 120, 50], axis=1)
AttendFn = Callable[..., jax.Array]
interpreted: AttendFn = partial(splash_attend, is_interpreted=True)


def config_of(num_kv_heads: int = 2, **options: Any) -> AttentionConfig:
    return AttentionConfig(2, num_kv_heads, HEAD_DIM, HEAD_DIM**-0.5, **options)


class Kind(NamedTuple):
    """An attention, and what its rows hide."""

    config: AttentionConfig
    mask: np.ndarray | None = None
    segments: np.ndarray | None = None
    window: Any = None


KINDS = {
    "padded on the left": Kind(config_of(), LEFT_PADDED),
    "over another, padded sequence": Kind(config_of(is_causal=False), PADDED[:, 300:500]),
    "a window of a layer's own": Kind(config_of(), window=jnp.asarray(70)),
    "packed, padded, a window, capped": Kind(config_of(1, cap=1.5), PADDED, SEGMENTS, 70),
}


def draw(*shape: int, seed: int = 0) -> jax.Array:
    numbers = np.random.default_rng(seed).standard_normal(shape)
    return jnp.asarray(numbers, jnp.float32)


def attended(attend: AttendFn, kind: Kind, **options: Any) -> Any:
    """Return results and gradients of the queries that see a key."""
    num_keys = LENGTH if kind.mask is None else kind.mask.shape[1]
    num_groups = kind.config.num_kv_heads
    heads = (
        draw(BATCH, LENGTH, 2, HEAD_DIM, seed=1),
        draw(BATCH, num_keys, num_groups, HEAD_DIM, seed=2),
        draw(BATCH, num_keys, num_groups, HEAD_DIM, seed=3),
    )
    sees = np.ones((BATCH, LENGTH))
    if kind.config.is_causal and kind.mask is not None:
        sees = kind.mask
    counted = draw(*heads[0].shape, seed=4) * sees[:, :, None, None]

    def total(*heads: jax.Array) -> tuple[jax.Array, jax.Array]:
        biases = row_biases(kind.mask, kind.segments)
        found = attend(kind.config, *heads, biases, window=kind.window, **options) * counted
        return jnp.sum(found), found

    return jax.jit(jax.grad(total, argnums=(0, 1, 2), has_aux=True))(*heads)


def assert_near(found: Any, expected: Any) -> None:
    """Forward to 1e-5 and gradients to 1e-4, as float32 sums in another order are."""
    np.testing.assert_allclose(found[1], expected[1], rtol=0, atol=1e-5)
    for one, other in zip(found[0], expected[0], strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
def test_results_and_gradients_are_those_of_formed_scores(kind):
    options = {"windows": (70, 1000)} if isinstance(kind.window, jax.Array) else {}

    found = attended(interpreted, kind, **options)

    assert_near(found, attended(attend_grouped, kind))


def test_packed_rows_are_attended_to_as_one_by_one():
    """Of short rows, in one block."""
    config = config_of(1)
    heads = draw(2, 12, 2, HEAD_DIM), draw(2, 12, 1, HEAD_DIM), draw(2, 12, 1, HEAD_DIM)
    segments = np.repeat([[1, 2], [5, 6]], [5, 7], axis=1)

    found = interpreted(config, *heads, row_biases(None, segments))

    parts = [[x[:, part] for x in heads] for part in (slice(0, 5), slice(5, 12))]
    expected = [attend_grouped(config, *part) for part in parts]
    np.testing.assert_allclose(found, jnp.concatenate(expected, axis=1), atol=1e-5)


def test_every_shard_attends_with_its_own_rows_and_heads():
    """Three rows, which the shards do not divide."""
    config = AttentionConfig(4, 2, HEAD_DIM, HEAD_DIM**-0.5)
    heads = draw(3, 12, 4, HEAD_DIM), draw(3, 12, 2, HEAD_DIM), draw(3, 12, 2, HEAD_DIM, seed=1)
    biases = row_biases(None, np.repeat([[1, 2]], [5, 7], axis=1).repeat(3, axis=0))
    deployer = Deployer(2, num_fsdp_shards=2, devices=jax.devices()[:8])
    heads = jax.device_put(heads, deployer.named_sharding())

    def gradients(attend: AttendFn) -> Callable[..., Any]:
        def total(*heads: jax.Array) -> jax.Array:
            found = attend(config, *heads, biases)
            return jnp.sum(found * jnp.cos(jnp.arange(found.size)).reshape(found.shape))

        return jax.jit(deployer.on_mesh(jax.value_and_grad(total, argnums=(0, 1, 2))))

    found, expected = (gradients(attend)(*heads) for attend in (interpreted, attend_grouped))

    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("length", "block"), [(1, 128), (200, 256), (600, 384), (1024, 512), (1100, 384), (8192, 512)]
)
def test_blocks_fill_a_sequence_up_least(length, block):
    assert block_length(length) == block
