from __future__ import annotations

import jax
import numpy as np

from redco_flow.models.random import dropout, fold_in, normal, random_bits


def raw_keys(count: int) -> jax.Array:
    return jax.random.key_data(jax.random.split(jax.random.key(5), count))


def test_bits_are_those_of_jax_random():
    keys = jax.random.split(jax.random.key(5), 3)

    expected = jax.vmap(lambda key: jax.random.bits(key, (4, 5)))(keys)

    np.testing.assert_array_equal(random_bits(jax.random.key_data(keys), (4, 5)), expected)


def test_normals_are_those_of_jax_random():
    key = jax.random.key(5)

    found = normal(jax.random.key_data(key), (30, 7))

    # Another compilation may round the logarithm in erf_inv otherwise.
    np.testing.assert_allclose(found, jax.random.normal(key, (30, 7)), rtol=1e-6)


def test_folded_keys_are_those_of_jax_random():
    key = jax.random.key(5)

    expected = jax.random.key_data(jax.random.fold_in(key, 9))

    np.testing.assert_array_equal(fold_in(jax.random.key_data(key), 9), expected)


def test_streams_of_one_key_are_unrelated():
    bits = [np.asarray(random_bits(raw_keys(1), (4000,), stream=n)) for n in range(2)]

    ones_in_common = np.unpackbits((bits[0] ^ bits[1]).view(np.uint8)).mean()

    # 128,000 fair coins: a stddev of 0.006 is four standard deviations.
    assert abs(ones_in_common - 0.5) < 0.006


def test_dropout_keeps_the_share_and_the_mean():
    ones = np.ones((4, 50_000), np.float32)

    dropped = np.asarray(dropout(ones, 0.1, raw_keys(4), site=2))

    # 200,000 draws: four standard deviations are 0.0027.
    assert abs((dropped == 0).mean() - 0.1) < 0.0027
    np.testing.assert_allclose(np.unique(dropped), [0, 1 / 0.9], rtol=1e-6)
