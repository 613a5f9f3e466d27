"""Beams write into one cache and are told apart by who wrote what."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from redco_flow.models.attention.cache import (
    BlockedHeads,
    append,
    attend_cached,
    no_writers,
    places_back,
    with_room,
    with_room_for,
    with_writers,
    written,
)
from redco_flow.models.layer_config import AttentionConfig

NUM_ROWS, NUM_BEAMS, NUM_STEPS, NUM_GROUPS, HEAD_DIM, PROMPT = 2, 3, 4, 2, 5, 6


class CacheOfALayer(NamedTuple):
    """The cache of a model of one layer."""

    beams: jax.Array
    heads: BlockedHeads


@pytest.mark.parametrize("room", [3])
def test_a_beam_attends_to_its_own_past_however_often_beams_were_reordered(room):
    """Against copies of the past that are reordered as beams are, in NumPy; in blocks, too."""
    rng = np.random.default_rng(0)
    config = AttentionConfig(4, NUM_GROUPS, HEAD_DIM, scale=0.3, is_causal=True)
    prompt = rng.standard_normal((2, NUM_ROWS, PROMPT, NUM_GROUPS, HEAD_DIM)).astype(np.float32)
    heads = with_room((jnp.asarray(prompt[0]), jnp.asarray(prompt[1])), NUM_BEAMS * room)
    cache = CacheOfALayer(no_writers(NUM_ROWS, NUM_BEAMS, room), heads)
    pasts = [[[] for _ in range(NUM_BEAMS)] for _ in range(NUM_ROWS)]

    for step in range(NUM_STEPS):
        new = rng.standard_normal((2, NUM_ROWS, NUM_BEAMS, NUM_GROUPS, HEAD_DIM)).astype(np.float32)
        query = rng.standard_normal((NUM_ROWS, NUM_BEAMS, 4, HEAD_DIM)).astype(np.float32)
        for row, beam in np.ndindex(NUM_ROWS, NUM_BEAMS):
            pasts[row][beam].append(new[:, row, beam])
        cache = with_room_for(cache, room * (step // room + 1))
        writers = with_writers(cache.beams, step)
        place = PROMPT + step * NUM_BEAMS
        new_heads = (jnp.asarray(new[0]), jnp.asarray(new[1]))
        heads, kept = append(cache.heads, new_heads, None, place)
        of_prompt = jnp.ones((NUM_ROWS, NUM_BEAMS, PROMPT), bool)
        seen = jnp.concatenate([of_prompt, written(writers, step)], axis=-1)
        bias = jnp.where(seen, 0.0, -1e9)[:, None]

        found = attend_cached(config, jnp.asarray(query), kept, (bias,))

        for row, beam in np.ndindex(NUM_ROWS, NUM_BEAMS):
            past = np.concatenate([prompt[:, row], np.stack(pasts[row][beam], axis=1)], axis=1)
            expected = attended(config, query[row, beam], *past)
            np.testing.assert_allclose(found[row, beam], expected, rtol=1e-5, atol=1e-6)
        parents = rng.integers(0, NUM_BEAMS, (NUM_ROWS, NUM_BEAMS))
        writers = jnp.take_along_axis(writers, parents[:, :, None], axis=1)
        cache = CacheOfALayer(writers, heads)
        pasts = [[list(pasts[row][parent]) for parent in parents[row]] for row in range(NUM_ROWS)]


def attended(
    config: AttentionConfig, query: np.ndarray, keys: np.ndarray, values: np.ndarray
) -> np.ndarray:
    """Attend with each head of one token (H, K) over a past (M, G, K)."""
    per_group = config.num_heads // config.num_kv_heads
    heads = []
    for head in range(config.num_heads):
        scores = keys[:, head // per_group] @ query[head] * config.scale
        weights = np.exp(scores - scores.max())
        heads.append(weights / weights.sum() @ values[:, head // per_group])
    return np.stack(heads)


@pytest.mark.parametrize("layer", [0, 2])
def test_a_token_is_written_into_its_layer_of_a_stack_and_nowhere_else(layer):
    rng = np.random.default_rng(1)
    stack = rng.standard_normal((3, NUM_ROWS, NUM_GROUPS, 7, HEAD_DIM)).astype(np.float32)
    heads = rng.standard_normal((NUM_ROWS, NUM_BEAMS, NUM_GROUPS, HEAD_DIM)).astype(np.float32)
    full = (jnp.ones((3, NUM_ROWS, NUM_GROUPS, 2, HEAD_DIM)),) * 2
    cache = BlockedHeads((full, (jnp.asarray(stack), jnp.asarray(-stack))))

    written_to, own = append(cache, (jnp.asarray(heads),) * 2, jnp.asarray(layer), 2 + 4)

    assert written_to.blocks[0] is full
    (keys, values), (own_keys, own_values) = written_to.blocks[1], own.blocks[1]
    expected = stack.copy()
    expected[layer, :, :, 4:7] = heads.swapaxes(1, 2)
    np.testing.assert_array_equal(keys, expected)
    np.testing.assert_array_equal(own_keys, expected[layer])
    np.testing.assert_array_equal(values[layer, :, :, :4], -stack[layer, :, :, :4])
    np.testing.assert_array_equal(own_values, values[layer])


def test_places_say_how_many_tokens_back_they_stand():
    back = places_back(no_writers(1, 2, 3), 1)

    np.testing.assert_array_equal(back, [[1, 1, 0, 0, -1, -1]])
