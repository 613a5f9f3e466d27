from __future__ import annotations

import jax
import numpy as np
import pytest

from redco_flow.models.attention.bias import (
    distance_bias,
    position_buckets,
    spread_diagonals,
)


def pairwise_bias(table, num_queries, num_keys, **kind):
    by_distance = distance_bias(table, np.arange(1 - num_queries, num_keys), **kind)
    return spread_diagonals(by_distance, num_queries, num_keys)[None]


@pytest.mark.slow
@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (8, 20), (16, 64)])
@pytest.mark.parametrize("bidirectional", [True, False])
def test_every_distance_falls_into_the_reference_bucket(num_buckets, max_distance, bidirectional):
    torch = pytest.importorskip("torch", reason="pip install torch==2.13.0 (extra: reference)")
    from transformers.models.t5.modeling_t5 import T5Attention

    distances = np.arange(-3000, 3001)

    found = position_buckets(
        distances, bidirectional=bidirectional, num_buckets=num_buckets, max_distance=max_distance
    )

    expected = T5Attention._relative_position_bucket(
        torch.tensor(distances), bidirectional, num_buckets, max_distance
    )
    np.testing.assert_array_equal(found, expected)


def test_each_pair_has_the_bias_of_its_distance():
    table = np.random.default_rng(0).standard_normal((8, 3)).astype(np.float32)

    bias = pairwise_bias(table, 4, 6, bidirectional=True, max_distance=20)

    for query in range(4):
        for key in range(6):
            bucket = position_buckets(
                np.array(key - query), bidirectional=True, num_buckets=8, max_distance=20
            )
            np.testing.assert_array_equal(bias[0, :, query, key], table[bucket])


def test_the_gradient_counts_the_pairs_of_each_bucket():
    table = np.zeros((8, 1), np.float32)

    gradient = jax.grad(
        lambda t: pairwise_bias(t, 9, 9, bidirectional=False, max_distance=20).sum()
    )(table)

    distances = np.arange(9)[None, :] - np.arange(9)[:, None]
    buckets = position_buckets(distances, bidirectional=False, num_buckets=8, max_distance=20)
    np.testing.assert_array_equal(gradient[:, 0], np.bincount(buckets.ravel(), minlength=8))
