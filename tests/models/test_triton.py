"""Triton's flash attention in Pallas' interpreter, against the attention that forms all scores."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from redco_flow import Deployer
from redco_flow.models.attention.bias import Biases, SameDocument, VisibleKeys, row_biases
from redco_flow.models.attention.grouped import attend_grouped
from redco_flow.models.attention.kernel_calls import with_named_residuals
from redco_flow.models.attention.triton import triton_attend
from redco_flow.models.attention.triton_blocks import BlockSizes
from redco_flow.models.config import ENDLESS_WINDOW
from redco_flow.models.layer_config import AttentionConfig

# Several blocks of the forward pass, the last of which it does not fill.
LENGTH, HEAD_DIM = 140, 6
SEGMENTS = np.repeat([[1, 2, 3, 0], [7, 8, 9, 0]], [30, 75, 25, 10], axis=1)
# The second document's end, and all that stands behind the third.
MASK = ((np.arange(LENGTH) < 95) | (SEGMENTS == 3) | (SEGMENTS == 9)).astype(np.int32)
PACKED, PADDED = row_biases(None, SEGMENTS), row_biases(MASK, SEGMENTS)
AttendFn = Callable[..., jax.Array]
interpreted: AttendFn = partial(triton_attend, is_interpreted=True)


def draw(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def config_of(num_heads: int, num_groups: int, **options: Any) -> AttentionConfig:
    return AttentionConfig(num_heads, num_groups, HEAD_DIM, HEAD_DIM**-0.5, **options)


def with_gradients(
    attend: AttendFn, config: AttentionConfig, biases: Biases, window: Any, num_keys: int
) -> Any:
    """Return results and gradients of the queries that see a key."""
    keys = num_keys, config.num_kv_heads, HEAD_DIM
    heads = (
        draw(2, LENGTH, config.num_heads, HEAD_DIM),
        draw(2, *keys, seed=1),
        draw(2, *keys, seed=2),
    )
    counted = draw(2, LENGTH, 1, 1, seed=3) * (MASK[:, :, None, None] if biases is PADDED else 1)

    def total(*heads: jax.Array) -> tuple[jax.Array, jax.Array]:
        found = attend(config, *heads, biases, window=window) * counted
        return jnp.sum(jnp.sin(found)), found

    return jax.jit(jax.grad(total, argnums=(0, 1, 2), has_aux=True))(*heads)


FORMS = {
    "packed, causal, grouped queries": (config_of(4, 2), PACKED, None),
    "window, soft cap": (config_of(2, 1, cap=2.0), (), 20),
    "packed, soft cap, window known when it runs": (
        config_of(2, 1, cap=2.0), PACKED, jnp.array(40)
    ),
    "window that also shows what comes": (config_of(2, 2, is_causal=False), PACKED, 33),
    "endless window": (config_of(2, 2), PADDED, jnp.array(ENDLESS_WINDOW)),
    "keys of another sequence": (
        config_of(4, 2, is_causal=False, is_cross=True),
        (VisibleKeys((np.arange(77) < [[40], [77]]).astype(np.int32)),),
        None,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("config", "biases", "window"), FORMS.values(), ids=FORMS)
def test_results_and_gradients_are_those_of_formed_scores(config, biases, window):
    num_keys = 77 if config.is_cross else LENGTH

    found = with_gradients(interpreted, config, biases, window, num_keys)

    expected = with_gradients(attend_grouped, config, biases, window, num_keys)
    np.testing.assert_allclose(found[1], expected[1], rtol=0, atol=1e-5)
    for one, other in zip(found[0], expected[0], strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-4)


def test_results_do_not_depend_on_the_blocks():
    """Each side of a pass has blocks of its own, and each pass is filled up to all of them."""
    blocks = BlockSizes(64, 16, 32, 16)
    config, biases, window = FORMS["packed, soft cap, window known when it runs"]

    found = with_gradients(partial(interpreted, blocks=blocks), config, biases, window, LENGTH)

    expected = with_gradients(attend_grouped, config, biases, window, LENGTH)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-4)


def test_blocks_of_other_documents_are_not_read():
    """Were they, a NaN there would be one here: even what is hidden is multiplied."""
    config = config_of(1, 1, is_causal=False)
    documents = np.repeat([[1, 2, 3]], 256, axis=1)
    biases = row_biases(None, documents)
    heads = [draw(1, 768, 1, HEAD_DIM, seed=seed) for seed in range(3)]
    broken = [jnp.where(documents[..., None, None] == 2, x, jnp.nan) for x in heads]

    def attended(*heads: jax.Array) -> jax.Array:
        return interpreted(config, *heads, biases)[:, 256:512]

    gradients = jax.grad(lambda *heads: jnp.sum(attended(*heads)), argnums=(0, 1, 2))
    for run in (jax.jit(attended), jax.jit(gradients)):
        found, expected = jax.tree.leaves(run(*broken)), jax.tree.leaves(run(*heads))
        for one, other in zip(found, expected, strict=True):
            ours = slice(256, 512) if one.shape[1] == 768 else slice(None)
            np.testing.assert_array_equal(one[:, ours], other[:, ours])


def test_a_query_that_sees_no_key_gives_0():
    config, heads = config_of(1, 1, is_causal=False), [draw(1, 20, 1, HEAD_DIM)] * 3
    biases = (SameDocument(jnp.asarray([[1] * 5 + [2] * 15]), jnp.asarray([[2] * 20])),)

    def total(*heads: jax.Array) -> jax.Array:
        return jnp.sum(interpreted(config, *heads, biases)[:, :5])

    found, gradients = jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2)))(*heads)

    assert found == 0
    assert all(jnp.all(gradient == 0) for gradient in gradients)


def test_every_shard_attends_with_its_own_rows_and_heads():
    """Over data 2 x fsdp 2 x model 2; three rows, which the shards do not divide."""
    config = config_of(4, 2)
    heads = draw(3, 12, 4, HEAD_DIM), draw(3, 12, 2, HEAD_DIM), draw(3, 12, 2, HEAD_DIM, seed=1)
    biases = row_biases(None, np.repeat([[1, 2]], [5, 7], axis=1).repeat(3, axis=0))
    deployer = Deployer(2, devices=jax.devices()[:8], num_fsdp_shards=2)
    heads = jax.device_put(heads, deployer.named_sharding())

    def total(attend: AttendFn, *heads: jax.Array) -> jax.Array:
        found = attend(config, *heads, biases)
        return jnp.sum(found * jnp.cos(jnp.arange(found.size)).reshape(found.shape))

    found, expected = (
        jax.jit(deployer.on_mesh(jax.value_and_grad(partial(total, attend), argnums=(0, 1, 2))))(
            *heads
        )
        for attend in (interpreted, attend_grouped)
    )

    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-4)


def gradients_of(attend: AttendFn, *policy: str | None) -> str:
    """Trace packed attention's gradients, of a layer that keeps what the policy names."""
    heads = [jax.ShapeDtypeStruct((2, LENGTH, num, 16), jnp.bfloat16) for num in (4, 2, 2)]
    config = AttentionConfig(4, 2, 16, 0.25)

    def layer(*heads: jax.Array) -> jax.Array:
        return attend(config, *heads, row_biases(MASK, SEGMENTS)).astype(jnp.float32)

    if policy:
        kept = jax.checkpoint_policies.save_only_these_names(*filter(None, policy))
        layer = jax.checkpoint(layer, policy=kept)
    return str(
        jax.make_jaxpr(jax.grad(lambda *heads: jnp.sum(layer(*heads)), argnums=(0, 1, 2)))(*heads)
    )


def test_no_array_as_large_as_the_scores_is_made():
    """Of 140 tokens, which are filled up to 192 keys and 256 queries."""
    scores = re.compile(r"\[(?:\d+,)*(?:140|192|256),(?:140|192|256)\]")

    assert scores.search(gradients_of(attend_grouped))
    assert not scores.search(gradients_of(triton_attend))


@pytest.mark.parametrize(("kept", "num_forward"), [("attention", 1), (None, 2)])
def test_what_is_kept_by_name_spares_the_second_forward_pass(kept, num_forward):
    jaxpr = gradients_of(triton_attend, kept)

    assert len(re.findall(r"name=flash_forward", jaxpr)) == num_forward


def test_residuals_have_a_name_unless_they_are_scores():
    """A softmax' statistics beside the result, as cuDNN's attention keeps them."""

    @jax.custom_vjp
    def kernel(query: jax.Array, lengths: jax.Array) -> jax.Array:
        return jnp.tanh(query) * lengths[:, None]

    def forward(query: jax.Array, lengths: jax.Array) -> Any:
        heads = kernel(query, lengths)
        scores = heads[:, :, None] * heads[:, None, :]
        return heads, (query, lengths, heads, jnp.sum(heads, axis=1), scores)

    def backward(kept: Any, cotangent: jax.Array) -> Any:
        query, lengths, heads, statistics, scores = kept
        weights = lengths[:, None] - heads**2 / lengths[:, None]
        return cotangent * weights + 0 * (statistics[:, None] + scores[:, 0] + query), None

    kernel.defvjp(forward, backward)
    operands = draw(2, 5), jnp.asarray([3, 4])
    named = with_named_residuals(kernel)

    def gradient(kernel: AttendFn) -> Callable[..., jax.Array]:
        return jax.grad(lambda query, lengths: jnp.sum(kernel(query, lengths)))

    jaxpr = str(jax.make_jaxpr(gradient(named))(*operands))

    np.testing.assert_array_equal(gradient(named)(*operands), gradient(kernel)(*operands))
    assert jaxpr.count("name=attention") == 2


@pytest.mark.parametrize(
    ("lengths", "head_dim", "itemsize", "expected"),
    [
        ((1, 1), 8, 2, BlockSizes(16, 16, 16, 16)),
        ((600, 77), 128, 2, BlockSizes(128, 32, 64, 64)),
        ((600, 600), 256, 2, BlockSizes(64, 32, 32, 32)),
        ((600, 20), 256, 4, BlockSizes(32, 32, 32, 32)),
    ],
)
def test_blocks_are_powers_of_two_and_smaller_where_heads_are_wide(
    lengths, head_dim, itemsize, expected
):
    assert BlockSizes.of(*lengths, head_dim, itemsize) == expected
