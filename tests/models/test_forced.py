from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from redco_flow.models.generation.generate import ForcedTokens, with_forced_tokens

LOGITS = np.random.default_rng(0).standard_normal((2, 3, 7)).astype(np.float32)


def probabilities(forced: ForcedTokens, position: int) -> np.ndarray:
    step = with_forced_tokens(lambda cache, tokens, _: (jnp.asarray(LOGITS), cache), forced, 4)
    logits, _ = step(None, jnp.zeros((2, 3), jnp.int32), jnp.asarray(position))
    return np.asarray(jax.nn.softmax(logits))


@pytest.mark.parametrize(("position", "token"), [(0, 5), (3, 2)])
def test_a_forced_token_is_certain_at_its_place(position, token):
    found = probabilities(ForcedTokens(first=5, last=2), position)

    np.testing.assert_array_equal(found, np.broadcast_to(np.eye(7)[token], (2, 3, 7)))


@pytest.mark.parametrize("position", [1, 2])
def test_between_them_the_model_has_its_say(position):
    found = probabilities(ForcedTokens(first=5, last=2), position)

    np.testing.assert_array_equal(found, jax.nn.softmax(LOGITS))


def test_the_lowest_of_several_last_tokens_is_certain():
    """As the first of transformers' equal scores; half a chance each would cost beams log(2)."""
    forced = ForcedTokens.of(SimpleNamespace(forced_eos_token_id=(6, 2)))

    found = probabilities(forced, 3)

    np.testing.assert_array_equal(found, np.broadcast_to(np.eye(7)[2], (2, 3, 7)))
