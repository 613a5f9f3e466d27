"""What cuDNN is asked for: computed by XLA from the same arguments, it is our attention."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from redco_flow import Deployer
from redco_flow.models.attention.bias import Biases, row_biases
from redco_flow.models.attention.cudnn import cudnn_attend, needs_bias
from redco_flow.models.attention.grouped import attend_grouped
from redco_flow.models.attention.kernels import Asked, cudnn_obstacle
from redco_flow.models.layer_config import AttentionConfig
from tests.engine.traffic import read_collectives

ROWS, LENGTH = 4, 24
CAUSAL = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=6, scale=6**-0.5)
BOTH_WAYS = replace(CAUSAL, is_causal=False)
PLACES = np.arange(LENGTH)
COUNTS = np.array([24, 17, 1, 8])[:, None]
SEGMENTS = np.repeat([[1, 2, 3]], [9, 5, 10], axis=1).repeat(ROWS, axis=0)
RIGHT = (PLACES < COUNTS).astype(np.int32)
LEFT = RIGHT[:, ::-1]
HOLES = np.random.default_rng(5).integers(0, 2, (ROWS, LENGTH)).astype(np.int32)
BY_XLA = partial(jax.nn.dot_product_attention, implementation="xla")


def draw(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(sum(shape)).standard_normal(shape), jnp.float32)


QUERY, KEY = draw(ROWS, LENGTH, 4, 6), draw(ROWS, LENGTH, 2, 6)
VALUE = draw(ROWS, LENGTH, 2, 6) + 1


def with_gradients(
    attend: Any, config: AttentionConfig, biases: Biases, counted: Any, **given: Any
):
    """Attention, and the gradients of what counts."""

    def total(query: jax.Array, key: jax.Array, value: jax.Array) -> Any:
        heads = attend(config, query, key, value, biases, **given)
        heads = heads * counted[..., None, None]
        return jnp.sum(jnp.sin(heads)), heads

    gradients, heads = jax.jit(jax.grad(total, (0, 1, 2), has_aux=True))(QUERY, KEY, VALUE)
    return heads, *gradients


@pytest.mark.parametrize(
    ("config", "mask", "counted"),
    [
        (BOTH_WAYS, RIGHT, RIGHT >= 0),
        (BOTH_WAYS, LEFT, LEFT >= 0),
        (BOTH_WAYS, HOLES, HOLES >= 0),
        (CAUSAL, RIGHT, RIGHT >= 0),
        (CAUSAL, LEFT, LEFT > 0),
        (CAUSAL, HOLES, HOLES > 0),
    ],
    ids=["right", "left", "holes", "causal, right", "causal, left", "causal, holes"],
)
def test_padding_is_told_as_a_number_of_keys(config, mask, counted):
    """Exact wherever a token counts; padding behind a causal text is as in our own attention."""
    biases = row_biases(mask, None)

    found = with_gradients(
        partial(cudnn_attend, attention=BY_XLA), config, biases, counted.astype(np.float32)
    )

    assert not needs_bias(config, QUERY, KEY, biases, None)
    expected = with_gradients(attend_grouped, config, biases, counted.astype(np.float32))
    for one, two in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, two, atol=1e-5, rtol=1e-4)


def test_hidden_queries_before_visible_ones_see_nothing_and_no_result_is_infinite():
    for mask in (LEFT, HOLES, np.zeros_like(LEFT)):
        found = cudnn_attend(CAUSAL, QUERY, KEY, VALUE, row_biases(mask, None), attention=BY_XLA)

        is_before = (mask == 0) & (np.cumsum(mask[:, ::-1], axis=1)[:, ::-1] > 0)
        assert np.isfinite(found).all()
        assert (np.asarray(found)[is_before] == 0).all()


@pytest.mark.parametrize(
    ("window", "windows"),
    [(5, ()), (LENGTH, ()), (jnp.asarray(5), (5, LENGTH)), (jnp.asarray(5), ())],
)
@pytest.mark.parametrize("hiding", ["nothing", "padding", "documents", "both"])
def test_windows_and_documents_are_those_of_our_own_attention(window, windows, hiding):
    biases = row_biases(
        RIGHT if hiding in ("padding", "both") else None,
        SEGMENTS if hiding in ("documents", "both") else None,
    )
    counted = np.ones((ROWS, LENGTH), np.float32)
    # Behind the window of a short text, or of a document that is padding, nothing is seen.
    if hiding in ("padding", "both"):
        counted = RIGHT.astype(np.float32)

    found = with_gradients(
        partial(cudnn_attend, attention=BY_XLA), CAUSAL, biases, counted, window=window,
        windows=windows,
    )  # fmt: skip

    expected = with_gradients(attend_grouped, CAUSAL, biases, counted, window=window)
    for one, two in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, two, atol=1e-5, rtol=1e-4)


def asked_for(config: AttentionConfig, biases: Biases, **given: Any) -> tuple[str, list[Any]]:
    """Trace what is computed around the kernel; return it, and the arguments that it is given."""
    asked: list[Any] = []

    def kernel(query: jax.Array, key: jax.Array, value: jax.Array, **arguments: Any) -> jax.Array:
        asked.append(
            {name: jnp.shape(x) if hasattr(x, "shape") else x for name, x in arguments.items()}
        )
        return query

    attend = partial(cudnn_attend, config, attention=kernel, **given)
    return str(jax.make_jaxpr(attend)(QUERY, KEY, VALUE, biases)), asked


SCORES = re.compile(rf"\[(\d+,)*{LENGTH},{LENGTH}\]")


@pytest.mark.parametrize(
    ("config", "mask", "given", "expected"),
    [
        (CAUSAL, None, {}, [{"is_causal": True}]),
        (CAUSAL, RIGHT, {}, [{"is_causal": True, "key_value_seq_lengths": (ROWS,)}]),
        (BOTH_WAYS, RIGHT, {}, [{"is_causal": False, "key_value_seq_lengths": (ROWS,)}]),
        (CAUSAL, None, {"window": 5}, [{"is_causal": True, "local_window_size": (4, 0)}]),
        (CAUSAL, None, {"window": jnp.asarray(5), "windows": (5, LENGTH)},
         [{"is_causal": True, "local_window_size": (4, 0)}, {"is_causal": True}]),
    ],
    ids=["causal", "causal padding", "padding", "window", "two windows"],
)  # fmt: skip
def test_no_array_as_large_as_the_scores_is_made(config, mask, given, expected):
    jaxpr, asked = asked_for(config, row_biases(mask, None), **given)

    assert asked == [{"scale": CAUSAL.scale, **one} for one in expected]
    assert not SCORES.search(jaxpr)


def test_documents_and_padding_under_a_window_are_a_bias():
    """cuDNN takes no segment ids from JAX; hidden keys amid others count in a window."""
    for biases, given in [
        (row_biases(None, SEGMENTS), {}),
        (row_biases(RIGHT, None), {"window": 5}),
    ]:
        jaxpr, (asked,) = asked_for(CAUSAL, biases, **given)

        assert asked["bias"] == (ROWS, 1, LENGTH, LENGTH)
        assert SCORES.search(jaxpr)


def test_moving_hidden_keys_exchanges_nothing_between_devices():
    deployer = Deployer(2, devices=jax.devices()[:8], num_fsdp_shards=2)
    heads = deployer.named_sharding(("data", "fsdp"), None, "model")
    rows = deployer.named_sharding(("data", "fsdp"))
    inputs = [jax.device_put(x, heads) for x in (QUERY, KEY, VALUE)]

    def kernel(query: jax.Array, key: jax.Array, value: jax.Array, **_: Any) -> jax.Array:
        return query + jnp.repeat(key + value, 2, axis=2)

    def attend(query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array) -> jax.Array:
        biases = row_biases(mask, None)
        return cudnn_attend(CAUSAL, query, key, value, biases, attention=kernel)

    compiled = jax.jit(attend, out_shardings=heads).lower(*inputs, jax.device_put(LEFT, rows))

    assert read_collectives(compiled.compile().as_text()) == []


@pytest.mark.parametrize(
    ("changes", "length", "dtype", "expected"),
    [
        ({}, 24, "bfloat16", None),
        ({}, 23, "bfloat16", "lengths are odd, and JAX trains by cuDNN only where they are even"),
        ({}, 24, "float32", "cuDNN does not compute in float32"),
        ({"cap": 5.0}, 24, "bfloat16", "cuDNN has no soft cap"),
        (
            {"head_dim": 256}, 24, "bfloat16",
            "heads have 256 dims; cuDNN takes 128 or fewer, by 8",
        ),
    ],
)  # fmt: skip
def test_what_cudnn_cannot_is_told(changes, length, dtype, expected):
    config = replace(CAUSAL, **{"head_dim": 64, **changes})
    heads = [jax.ShapeDtypeStruct((2, length, num, config.head_dim), dtype) for num in (4, 2)]

    found = cudnn_obstacle(Asked(config, *heads, (), None, (), drops=False))

    assert found == expected
