from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from redco_flow.models.feed_forward.experts import plan_dispatch
from redco_flow.models.feed_forward.grouped_product import grouped_product

INNER, OUTER = 6, (2, 5)
# Rows of each group: even, skewed, with nothing, fewer than a block, more than several blocks.
SIZES = {
    "even": (20, 20, 20, 20),
    "all in one": (0, 400, 0),
    "none in the last": (3, 130, 0),
    "few": (1, 0, 2),
    "one row": (0, 1),
    "many blocks": (700, 1, 64, 63, 65),
}


def operands(sizes: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(sum(sizes), INNER)).astype(np.float32)
    kernels = rng.normal(size=(len(sizes), INNER, *OUTER)).astype(np.float32)
    return x, kernels, np.cumsum(sizes).astype(np.int32)


def loop(x: np.ndarray, kernels: np.ndarray, ends: np.ndarray) -> np.ndarray:
    groups = np.searchsorted(ends, np.arange(len(x)), side="right")
    rows = [np.tensordot(row, kernels[group], 1) for row, group in zip(x, groups, strict=True)]
    return np.stack(rows)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_each_row_is_multiplied_by_its_groups_kernel(sizes):
    x, kernels, ends = operands(sizes)

    found = jax.jit(grouped_product)(x, kernels, ends)

    # 1e-6 of the largest: float32 sums of 6 products.
    expected = loop(x.astype(np.float64), kernels, ends)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6 * np.abs(expected).max())


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_gradients_are_the_sums_over_each_groups_own_rows(sizes):
    x, kernels, ends = operands(sizes)
    cotangent = np.random.default_rng(1).normal(size=(len(x), *OUTER)).astype(np.float32)

    @jax.jit
    def gradients(x, kernels):
        _, pull_back = jax.vjp(lambda x, kernels: grouped_product(x, kernels, ends), x, kernels)
        return pull_back(jnp.asarray(cotangent))

    to_x, to_kernels = gradients(x, kernels)

    turned = np.swapaxes(kernels.reshape(len(sizes), INNER, -1), 1, 2)
    flat = cotangent.reshape(len(x), -1)
    expected_x = loop(flat.astype(np.float64), turned, ends)
    np.testing.assert_allclose(to_x, expected_x, rtol=0, atol=1e-6 * np.abs(expected_x).max())
    for group, rows in enumerate(np.split(np.arange(len(x)), ends[:-1])):
        expected = np.tensordot(x[rows].astype(np.float64), cotangent[rows], ((0,), (0,)))
        # Zero, exactly, where a group has no rows.
        tolerance = 1e-6 * np.abs(expected).max()
        np.testing.assert_allclose(to_kernels[group], expected, rtol=0, atol=tolerance)


def test_kernels_gradients_in_bfloat16_are_summed_in_float32():
    """Engine case 41: of 400 equal blocks bfloat16 would count no more than 256."""
    num_rows = 400 * 1024
    x, ends = jnp.ones((num_rows, 1), jnp.bfloat16), jnp.array([num_rows])

    def total(kernels):
        return jnp.sum(grouped_product(x, kernels, ends).astype(jnp.float32))

    gradient = jax.jit(jax.grad(total))(jnp.ones((1, 1, 1), jnp.bfloat16))

    assert gradient.dtype == jnp.bfloat16
    # 0.4 %: the result has 8 bits.
    np.testing.assert_allclose(gradient.astype(np.float32), num_rows, rtol=4e-3)


def test_rows_come_to_their_experts_in_order_and_back():
    experts = np.array([2, 0, 3, 0, 2, 2])
    rows = np.arange(12.0, dtype=np.float32).reshape(6, 2)

    dispatch = plan_dispatch(jnp.asarray(experts), 5)
    there = dispatch.sorted_by_expert(jnp.asarray(rows))

    np.testing.assert_array_equal(there, rows[[1, 3, 0, 4, 5, 2]])
    np.testing.assert_array_equal(dispatch.ends, [2, 2, 5, 6, 6])
    np.testing.assert_array_equal(dispatch.sorted_by_token(there), rows)


def test_gradients_of_rows_are_brought_back_the_same_way():
    rng = np.random.default_rng(0)
    experts, rows, weights = rng.integers(0, 4, 9), rng.normal(size=(9, 3)), rng.normal(size=(9, 3))
    dispatch = plan_dispatch(jnp.asarray(experts), 4)

    def weighted(rows):
        return jnp.sum(dispatch.sorted_by_expert(rows) * weights)

    gradient = jax.grad(weighted)(jnp.asarray(rows, jnp.float32))

    order = np.argsort(experts, kind="stable")
    expected = np.empty_like(weights)
    expected[order] = weights
    np.testing.assert_allclose(gradient, expected, rtol=1e-6)
