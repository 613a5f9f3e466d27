"""Triton's and cuDNN's attention as a GPU computes it, against scores formed in float32."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from redco_flow import Deployer
from redco_flow.models.attention import kernels
from redco_flow.models.attention.bias import Biases, SameDocument, VisibleKeys, row_biases
from redco_flow.models.attention.cudnn import cudnn_attend
from redco_flow.models.attention.grouped import attend_grouped
from redco_flow.models.attention.triton import triton_attend
from redco_flow.models.layer_config import AttentionConfig

pytestmark = pytest.mark.gpu

ROWS, LENGTH, OTHER_LENGTH = 2, 600, 334
# Kernels multiply bfloat16 numbers and add up float32: an error of a few roundings of the whole.
BFLOAT16_ERROR, FLOAT32_ERROR = 1e-2, 2e-5
PLACES = np.arange(LENGTH)
SEGMENTS = np.repeat([[1, 2, 3, 0], [7, 8, 9, 0]], [130, 310, 120, 40], axis=1)
RIGHT = (PLACES < [[600], [333]]).astype(np.int32)
LEFT = RIGHT[:, ::-1].copy()
HOLES = np.random.default_rng(5).integers(0, 2, (ROWS, LENGTH)).astype(np.int32)
Attend = Callable[..., jax.Array]


def config_of(num_heads: int, num_groups: int, head_dim: int, **options: Any) -> AttentionConfig:
    return AttentionConfig(num_heads, num_groups, head_dim, head_dim**-0.5, **options)


def draw_heads(config: AttentionConfig, dtype: str) -> list[jax.Array]:
    """Queries, keys and values: the same ones for one config."""
    random = np.random.default_rng(config.num_heads * config.head_dim)
    num_keys = OTHER_LENGTH if config.is_cross else LENGTH
    shapes = [
        (ROWS, LENGTH, config.num_heads, config.head_dim),
        *[(ROWS, num_keys, config.num_kv_heads, config.head_dim)] * 2,
    ]
    return [jnp.asarray(random.standard_normal(shape), dtype) for shape in shapes]


def with_gradients(
    attend: Attend, heads: list[jax.Array], counted: Any, biases: Biases, window: Any
) -> list[np.ndarray]:
    """Return results and gradients of the queries that count, as float32."""

    def total(*heads: jax.Array) -> tuple[jax.Array, jax.Array]:
        looks = jnp.asarray(window) if isinstance(window, np.integer) else window
        found = attend(*heads, biases, window=looks).astype(jnp.float32)
        found *= counted[..., None, None]
        return jnp.sum(jnp.sin(found)), found

    gradients, found = jax.jit(jax.grad(total, argnums=(0, 1, 2), has_aux=True))(*heads)
    return [np.asarray(x, np.float32) for x in (found, *gradients)]


def expected_of(
    config: AttentionConfig, heads: list[jax.Array], counted: Any, biases: Biases, window: Any
) -> list[np.ndarray]:
    wide = [x.astype(jnp.float32) for x in heads]
    with jax.default_matmul_precision("highest"):
        return with_gradients(partial(attend_grouped, config), wide, counted, biases, window)


def assert_close(found: list[np.ndarray], expected: list[np.ndarray], allowed: float) -> None:
    for name, one, other in zip(("heads", "query", "key", "value"), found, expected, strict=True):
        error = np.linalg.norm(one - other) / np.linalg.norm(other)
        assert error < allowed, f"{name}: {error}"


CROSS = (VisibleKeys((np.arange(OTHER_LENGTH) < [[200], [334]]).astype(np.int32)),)
PACKED, PACKED_PADDED = row_biases(None, SEGMENTS), row_biases(RIGHT, SEGMENTS)
TRITON = {
    "causal, grouped": (config_of(8, 2, 128), (), None, None),
    "causal, packed": (config_of(8, 2, 64), PACKED, None, None),
    "packed, padded": (config_of(4, 4, 80), PACKED_PADDED, None, RIGHT),
    "bidirectional, left padded": (
        config_of(4, 4, 64, is_causal=False), row_biases(LEFT, None), None, LEFT
    ),
    "window, soft cap, wide": (config_of(4, 2, 256, cap=5.0), (), 100, None),
    "packed, window known when it runs": (config_of(4, 2, 128), PACKED, np.int32(100), None),
    "cross": (config_of(4, 4, 64, is_causal=False, is_cross=True), CROSS, None, None),
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("form", TRITON)
def test_triton_attends_as_formed_scores_do(form, dtype):
    config, biases, window, counted = TRITON[form]
    counted = np.ones((ROWS, LENGTH)) if counted is None else counted
    heads = draw_heads(config, dtype)

    found = with_gradients(partial(triton_attend, config), heads, counted, biases, window)

    expected = expected_of(config, heads, counted, biases, window)
    assert_close(found, expected, BFLOAT16_ERROR if dtype == "bfloat16" else FLOAT32_ERROR)


def test_a_query_that_sees_no_key_gives_0_and_no_gradient():
    config = config_of(1, 1, 64, is_causal=False)
    heads = draw_heads(config, "bfloat16")
    ids = jnp.asarray(np.full((ROWS, LENGTH), 2))
    biases = (SameDocument(ids.at[:, :50].set(1), ids),)

    found, *gradients = with_gradients(
        partial(triton_attend, config), heads, PLACES[None, :] < 50, biases, None
    )

    assert (found == 0).all()
    assert all((gradient == 0).all() for gradient in gradients)


CUDNN = {
    "causal, grouped": (config_of(8, 2, 128), None, None, None),
    "causal, right padded": (config_of(8, 2, 64), RIGHT, None, None),
    "causal, left padded": (config_of(4, 4, 64), LEFT, None, LEFT),
    "causal, holes": (config_of(4, 4, 64), HOLES, None, HOLES),
    "bidirectional, right padded": (config_of(4, 4, 64, is_causal=False), RIGHT, None, None),
    "bidirectional, holes": (config_of(4, 2, 128, is_causal=False), HOLES, None, None),
    "window": (config_of(4, 2, 128), None, 100, None),
    "a bias of documents": (config_of(4, 2, 128), "documents", None, None),
}


@pytest.mark.parametrize("form", CUDNN)
def test_cudnn_attends_as_formed_scores_do(form):
    config, mask, window, counted = CUDNN[form]
    biases = PACKED if mask == "documents" else row_biases(mask, None)
    counted = np.ones((ROWS, LENGTH)) if counted is None else counted
    heads = draw_heads(config, "bfloat16")

    found = with_gradients(partial(cudnn_attend, config), heads, counted, biases, window)

    expected = expected_of(config, heads, counted, biases, window)
    assert_close(found, expected, BFLOAT16_ERROR)


def test_of_rows_that_show_nothing_no_result_of_cudnn_is_infinite():
    config = config_of(4, 4, 64)
    biases = row_biases(np.zeros_like(LEFT), None)

    found = with_gradients(
        partial(cudnn_attend, config), draw_heads(config, "bfloat16"), LEFT, biases, None
    )

    assert all(np.isfinite(x).all() for x in found)


@pytest.mark.parametrize(
    ("options", "asked", "dtype", "expected"),
    [
        ({}, {}, "bfloat16", "cudnn"),
        ({}, {"biases": row_biases(RIGHT, None)}, "bfloat16", "cudnn"),
        ({}, {"biases": PACKED}, "bfloat16", "triton"),
        ({"cap": 5.0}, {}, "bfloat16", "triton"),
        ({}, {}, "float32", "triton"),
        ({}, {"length": LENGTH - 1}, "bfloat16", "triton"),
        ({}, {"drops": True}, "bfloat16", "xla"),
    ],
    ids=["plain", "padded", "packed", "soft cap", "float32", "odd length", "dropout"],
)
def test_this_gpu_attends_by_the_best_kernel_that_can(options, asked, dtype, expected):
    config = config_of(8, 2, 64, **options)
    query, key, _ = draw_heads(config, dtype)
    length = asked.get("length", LENGTH)
    chosen = []

    def choose(query: jax.Array, key: jax.Array) -> jax.Array:
        biases, drops = asked.get("biases", ()), asked.get("drops", False)
        chosen.append(
            kernels.choose_kernel(
                "auto", config, query, key, biases, window=None, windows=(), drops=drops
            )
        )
        return query

    on_mesh = Deployer(devices=jax.devices()[:1]).on_mesh(choose)
    jax.eval_shape(on_mesh, query[:, :length], key[:, :length])

    assert chosen == [expected]
