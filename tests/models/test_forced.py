from __future__ import annotations

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


def test_any_of_several_last_tokens_may_be_chosen():
    found = probabilities(ForcedTokens(last=(2, 6)), 3)

    np.testing.assert_allclose(found[..., [2, 6]], 0.5)
