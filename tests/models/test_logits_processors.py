from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from redco_flow.models.generation.logits_processors import (
    LogitsProcessing,
    processor,
    read_prompts,
)

EOS, VOCAB = 1, 9
PROMPTS = ([3, 4, 3], [5], [2, 2, 2, 6, 2])
TEXTS = ([4, 3, 4], [5, 5, 5], [2, 6, 2])


def read(on_the_left: bool):
    width = 6
    ids, mask = np.full((len(PROMPTS), width), 7), np.zeros((len(PROMPTS), width), np.int32)
    for row, prompt in enumerate(PROMPTS):
        place = slice(width - len(prompt), width) if on_the_left else slice(len(prompt))
        ids[row, place], mask[row, place] = prompt, 1
    return read_prompts(jnp.asarray(ids), jnp.asarray(mask))


def processed_by_hand(scores: np.ndarray, rules: LogitsProcessing, position: int) -> np.ndarray:
    """The three rules as they are said, token by token."""
    scores = scores.copy()
    for row, (prompt, text) in enumerate(zip(PROMPTS, TEXTS, strict=True)):
        so_far = prompt + text[:position]
        for token in range(VOCAB):
            place = (row, 0, token)
            if token in so_far:
                factor = rules.repetition_penalty
                scores[place] = scores[place] * (factor if scores[place] < 0 else 1 / factor)
            size = rules.no_repeat_ngram_size
            runs = [tuple(so_far[i : i + size]) for i in range(len(so_far) - size + 1)]
            if size and (*so_far[len(so_far) - size + 1 :], token) in runs:
                scores[place] = -np.inf
            if token == EOS and position < rules.min_new_tokens:
                scores[place] = -np.inf
    return scores


@pytest.mark.parametrize("on_the_left", [True, False])
@pytest.mark.parametrize("position", [0, 1, 3])
@pytest.mark.parametrize(
    "rules",
    [
        LogitsProcessing(repetition_penalty=1.5),
        *(LogitsProcessing(no_repeat_ngram_size=size) for size in (1, 2, 3, 8, 40)),
        LogitsProcessing(min_new_tokens=2),
        LogitsProcessing(repetition_penalty=0.7, no_repeat_ngram_size=2, min_new_tokens=3),
    ],
)
def test_scores_are_changed_as_the_rules_say(rules, position, on_the_left):
    scores = np.random.default_rng(0).normal(0, 2, (len(PROMPTS), 1, VOCAB)).astype(np.float32)
    tokens = np.full((len(PROMPTS), 1, 5), 8)  # what is not written yet is in no text
    tokens[:, 0, :position] = np.array(TEXTS)[:, :position]

    found = jax.jit(processor(rules, read(on_the_left), EOS))(
        jnp.asarray(scores), jnp.asarray(tokens), jnp.asarray(position)
    )

    np.testing.assert_allclose(found, processed_by_hand(scores, rules, position), rtol=1e-6)


def test_without_rules_there_is_no_processor():
    assert processor(LogitsProcessing(), read(on_the_left=True), EOS) is None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"repetition_penalty": 0.0}, r"repetition_penalty is 0\.0; it must be above 0"),
        ({"no_repeat_ngram_size": -1}, "no_repeat_ngram_size is -1; it must be at least 0"),
        ({"min_new_tokens": -2}, "min_new_tokens is -2; it must be at least 0"),
    ],
)
def test_a_number_out_of_range_is_refused(values, message):
    with pytest.raises(ValueError, match=message):
        LogitsProcessing(**values)
