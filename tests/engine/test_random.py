from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from redco_flow.engine.random import dropout, fold_in, random_bits, random_bits_at


def raw_keys(count: int) -> jax.Array:
    return jax.random.key_data(jax.random.split(jax.random.key(5), count))


def test_bits_are_those_of_jax_random():
    keys = jax.random.split(jax.random.key(5), 3)

    expected = jax.vmap(lambda key: jax.random.bits(key, (4, 5)))(keys)

    np.testing.assert_array_equal(random_bits(jax.random.key_data(keys), (4, 5)), expected)


def test_bits_at_places_are_those_of_the_whole():
    keys, shape = raw_keys(3), (7, 11)
    places = np.array([[0, 76], [40, 11], [12, 3]], np.uint32)

    found = random_bits_at(keys, jnp.asarray(places))

    whole = np.asarray(random_bits(keys, shape)).reshape(3, -1)
    np.testing.assert_array_equal(found, whole[:, places])


def test_folded_keys_are_those_of_jax_random():
    key = jax.random.key(5)

    expected = jax.random.key_data(jax.random.fold_in(key, 9))

    np.testing.assert_array_equal(fold_in(jax.random.key_data(key)[None], 9), expected[None])


def test_masks_of_two_sites_are_unrelated():
    ones = np.ones((4, 50_000), np.float32)

    first, second = (np.asarray(dropout(ones, 0.5, raw_keys(4), site)) == 0 for site in range(2))

    # 200,000 fair coins: four standard deviations are 0.0045.
    assert abs((first == second).mean() - 0.5) < 0.0045


def test_dropout_keeps_the_share_and_the_mean():
    ones = np.ones((4, 50_000), np.float32)

    dropped = np.asarray(dropout(ones, 0.1, raw_keys(4), site=2))

    # 200,000 draws: four standard deviations are 0.0027.
    assert abs((dropped == 0).mean() - 0.1) < 0.0027
    np.testing.assert_allclose(np.unique(dropped), [0, 1 / 0.9], rtol=1e-6)


def test_dropout_in_bfloat16_keeps_the_mean():
    x = jnp.linspace(1, 2, 100_000).astype(jnp.bfloat16)[None]

    dropped = np.asarray(dropout(x, 0.1, raw_keys(1), site=0), np.float64)

    kept = dropped > 0
    mean = np.mean(dropped[kept] / np.asarray(x, np.float64)[kept])
    # Each is rounded, up as often as down; 1 / 0.9 in bfloat16 is 0.16% too small.
    np.testing.assert_allclose(mean, 1 / 0.9, rtol=3e-4)


def test_a_rate_next_to_nothing_drops_nothing_and_one_next_to_all_is_no_error():
    x = jnp.ones((2, 64))

    np.testing.assert_array_equal(dropout(x, 1e-17, raw_keys(2), 0), x)
    assert not dropout(x, 1 - 1e-16, raw_keys(2), 0).any()
