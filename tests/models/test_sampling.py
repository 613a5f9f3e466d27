from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from redco_flow.models.generation.sampling import Sampling, candidates, draw

HOWS = [
    Sampling(temperature=0.7),
    Sampling(top_k=5),
    Sampling(top_p=0.8),
    Sampling(temperature=1.5, top_k=9, top_p=0.6),
]


def logits_of(num_rows: int, vocab_size: int = 17) -> np.ndarray:
    return np.random.default_rng(0).normal(0, 2, (num_rows, vocab_size)).astype(np.float32)


def probabilities(logits: np.ndarray, how: Sampling) -> np.ndarray:
    """The distribution over all tokens that `candidates` stands for."""
    tokens, kept = candidates(jnp.asarray(logits), how)
    chances = np.zeros_like(logits)
    np.put_along_axis(chances, np.asarray(tokens), np.asarray(jax.nn.softmax(kept)), axis=1)
    return chances


@pytest.mark.parametrize("how", HOWS)
def test_the_distribution_is_that_of_the_torch_reference(how):
    torch = pytest.importorskip("torch", reason="pip install torch==2.13.0 (extra: reference)")
    from transformers.generation import logits_process as reference

    logits = logits_of(6)
    warpers: list[Any] = [reference.TemperatureLogitsWarper(how.temperature)]
    if how.top_k:
        warpers.append(reference.TopKLogitsWarper(how.top_k))
    if how.top_p < 1:
        warpers.append(reference.TopPLogitsWarper(how.top_p))
    expected = torch.tensor(logits)
    for warper in warpers:
        expected = warper(None, expected)

    found = probabilities(logits, how)

    np.testing.assert_allclose(found, torch.softmax(expected, -1).numpy(), atol=1e-6)


@pytest.mark.parametrize("how", HOWS)
def test_tokens_are_drawn_as_often_as_they_are_likely(how):
    num_draws = 20_000
    logits = logits_of(1)
    keys = jax.random.key_data(jax.random.split(jax.random.key(0), num_draws))

    drawn = draw(jnp.tile(logits, (num_draws, 1)), jnp.asarray(3), keys, how)

    expected = probabilities(logits, how)[0]
    found = np.bincount(np.asarray(drawn), minlength=17) / num_draws
    # Five standard deviations of a proportion; what may not be drawn never is.
    assert (np.abs(found - expected) <= 5 * np.sqrt(expected / num_draws)).all()


@pytest.mark.parametrize("temperature", [1e-9, 1e-60])
def test_next_to_temperature_zero_the_likeliest_token_wins(temperature):
    logits = logits_of(6) - 40  # as GPT-2's, all below 0
    keys = jax.random.key_data(jax.random.split(jax.random.key(2), 6))

    for how in (Sampling(temperature), Sampling(temperature, top_k=3, top_p=0.8)):
        drawn = draw(jnp.asarray(logits), jnp.asarray(0), keys, how)
        np.testing.assert_array_equal(drawn, logits.argmax(axis=1))


def test_a_row_draws_by_its_key_and_the_position_alone():
    logits = logits_of(4)
    keys = jax.random.key_data(jax.random.split(jax.random.key(1), 4))
    order = np.array([3, 1, 0, 2])

    def draws(rows: Any, first: int) -> np.ndarray:
        steps = range(first, first + 20)
        return np.stack(
            [draw(logits[rows], jnp.asarray(step), keys[rows], Sampling()) for step in steps]
        )

    together = draws(np.arange(4), 0)

    np.testing.assert_array_equal(draws(order, 0), together[:, order])
    np.testing.assert_array_equal(draws(np.array([2]), 0)[:, 0], together[:, 2])
    assert (draws(np.arange(4), 20) != together).any()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": 0.0}, r"temperature is 0\.0; it must be above 0"),
        ({"top_k": 0}, "top_k is 0; it must be at least 1"),
        ({"top_p": 0.0}, r"top_p is 0\.0; it must be in \(0, 1\]"),
        ({"top_p": 1.5}, r"top_p is 1\.5"),
    ],
)
def test_a_number_out_of_range_is_refused(values, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**values)
