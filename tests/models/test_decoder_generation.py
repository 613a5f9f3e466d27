"""Decoder-only models continue prompts of any lengths, padded on either side."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import numpy as np
import pytest

from redco_flow.models.generation.generate import LogitsProcessing, Sampling, generate

MAX_NEW_TOKENS = 12
PROMPT_LENGTHS = (6, 1, 4, 2, 7, 3, 5, 8)
EOS = 1
# Weights with which some rows end early and others run to the limit.
SEEDS = {
    "gpt2": 5, "llama": 7, "mistral": 4, "smollm3": 6, "gpt_oss": 0, "deepseek_v3": 1,
}  # fmt: skip

one_family = pytest.mark.parametrize("decoder", ["llama3"], indirect=True)


@pytest.fixture
def talkative(decoder):
    """A model of so few tokens that some of its rows end early."""
    return decoder.changed(vocab_size=11, seed=SEEDS[decoder.config.model_type])


def prompts(side: str, vocab_size: int = 11) -> dict[str, np.ndarray]:
    """The same prompts whichever side they are padded on."""
    rng = np.random.default_rng(3)
    width = max(PROMPT_LENGTHS)
    ids = np.zeros((len(PROMPT_LENGTHS), width), np.int32)
    mask = np.zeros_like(ids)
    for row, length in enumerate(PROMPT_LENGTHS):
        place = slice(width - length, width) if side == "left" else slice(0, length)
        ids[row, place] = rng.integers(2, vocab_size, length)
        mask[row, place] = 1
    return {"input_ids": ids, "attention_mask": mask}


def search(case: Any, batch: dict[str, np.ndarray], **how: Any) -> Any:
    rngs = how.pop("rngs", None)
    run = case.jitted(generate, max_new_tokens=MAX_NEW_TOKENS, **how)
    return run(case.params, batch["input_ids"], batch["attention_mask"], rngs=rngs)


def torch_search(model: Any, batch: dict[str, np.ndarray], **how: Any) -> Any:
    import torch

    found = model.generate(
        **{name: torch.tensor(values) for name, values in batch.items()},
        max_new_tokens=MAX_NEW_TOKENS,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
        **how,
    )
    return found.sequences[:, batch["input_ids"].shape[1] :], found


def until_end(tokens: Any) -> list[list[int]]:
    rows = np.asarray(tokens).tolist()
    return [row[: row.index(EOS) + 1] if EOS in row else row for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize("decoder", ["smollm3"], indirect=True)
def test_greedy_tokens_equal_the_torch_reference(talkative, torch_reference):
    found = search(talkative, prompts("left"))

    expected, _ = torch_search(torch_reference(talkative), prompts("left"))
    rows = until_end(found.tokens)
    assert rows == until_end(expected)
    assert len({len(row) for row in rows}) > 1, "the rows end at different lengths"


@pytest.mark.slow
@pytest.mark.parametrize("decoder", ["gpt_oss", "deepseek_v3"], indirect=True)
def test_beams_equal_the_torch_reference(talkative, torch_reference):
    """With sinks, windows and experts, and with a latent's cache; LLaMA's are below."""
    how = {"num_beams": 4}

    found = search(talkative, prompts("left"), **how)

    expected, scored = torch_search(torch_reference(talkative), prompts("left"), **how)
    assert until_end(found.tokens) == until_end(expected)
    np.testing.assert_allclose(found.scores, scored.sequences_scores, rtol=1e-4)


@pytest.mark.slow
@one_family
@pytest.mark.parametrize("side", ["left", "right"])
def test_logits_processors_read_prompts_as_the_torch_reference_does(
    talkative, torch_reference, side
):
    """`test_generation` has rules with beams."""
    rules = {"no_repeat_ngram_size": 3, "repetition_penalty": 0.8}
    found = search(talkative, prompts(side), processing=LogitsProcessing(**rules))

    # Each prompt by itself: transformers counts padding among the n-grams of a text.
    model, expected = torch_reference(talkative), []
    for row, length in enumerate(PROMPT_LENGTHS):
        alone = {name: values[row : row + 1, -length:] for name, values in prompts("left").items()}
        expected += until_end(torch_search(model, alone, **rules)[0])
    assert until_end(found.tokens) == expected
    plain = search(talkative, prompts("left"))
    assert until_end(found.tokens) != until_end(plain.tokens), "the rules change the texts"


@pytest.mark.slow
@one_family
def test_several_beams_of_a_row_are_those_of_the_torch_reference(talkative, torch_reference):
    how = {"num_beams": 4, "num_return_sequences": 4, "length_penalty": 0.6}

    found = search(talkative, prompts("left"), **how)

    expected, scored = torch_search(torch_reference(talkative), prompts("left"), **how)
    assert until_end(np.asarray(found.tokens).reshape(-1, MAX_NEW_TOKENS)) == until_end(expected)
    scores = np.asarray(found.scores).reshape(-1)
    np.testing.assert_allclose(scores, scored.sequences_scores, rtol=1e-4)


@pytest.mark.slow
@one_family
def test_any_of_several_end_tokens_ends_a_row_as_in_the_reference(talkative, torch_reference):
    several = talkative.changed(eos_token_id=(1, 4, 7), seed=1)
    model = torch_reference(several)

    for how in ({}, {"num_beams": 3}):
        found = search(several, prompts("left"), **how)
        expected, _ = torch_search(model, prompts("left"), pad_token_id=1, **how)
        width = expected.shape[1]
        np.testing.assert_array_equal(np.asarray(found.tokens)[:, :width], expected)


@pytest.mark.slow
@pytest.mark.parametrize("decoder", ["mistral"], indirect=True)
def test_a_prompt_padded_behind_is_continued_like_one_padded_in_front(talkative):
    left = search(talkative, prompts("left"), num_beams=3)
    right = search(talkative, prompts("right"), num_beams=3)

    np.testing.assert_array_equal(left.tokens, right.tokens)


@pytest.mark.slow
@one_family
def test_a_row_is_continued_alike_whatever_is_beside_it(talkative):
    batch, how = prompts("right"), {"sampling": Sampling(top_p=0.9)}
    rngs = jax.random.split(jax.random.key(5), len(PROMPT_LENGTHS))
    together = search(talkative, batch, **how, rngs=rngs)

    row, length = 3, PROMPT_LENGTHS[3]
    alone = {name: values[row : row + 1, :length] for name, values in batch.items()}
    found = search(talkative, alone, **how, rngs=rngs[row : row + 1])
    np.testing.assert_array_equal(found.tokens[0], together.tokens[row])


@pytest.mark.parametrize("decoder", ["gpt2"], indirect=True)
def test_sampling_the_likeliest_token_only_is_greedy_search(talkative):
    rngs = jax.random.split(jax.random.key(0), len(PROMPT_LENGTHS))

    found = search(talkative, prompts("left"), sampling=Sampling(top_k=1), rngs=rngs)

    expected = search(talkative, prompts("left"))
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    np.testing.assert_allclose(found.scores, expected.scores, rtol=1e-6)


@pytest.mark.parametrize("decoder", ["gpt2"], indirect=True)
def test_the_first_of_several_drawn_texts_is_the_one_drawn_alone(talkative):
    processing = LogitsProcessing(no_repeat_ngram_size=2)
    rngs = jax.random.split(jax.random.key(2), len(PROMPT_LENGTHS))
    how = {"sampling": Sampling(top_p=0.95), "processing": processing, "rngs": rngs}

    found = search(talkative, prompts("right"), num_return_sequences=5, **how)

    alone = search(talkative, prompts("right"), **how)
    tokens = np.asarray(found.tokens)
    assert tokens.shape == (len(PROMPT_LENGTHS), 5, MAX_NEW_TOKENS)
    np.testing.assert_array_equal(tokens[:, 0], alone.tokens)
    np.testing.assert_allclose(found.scores[:, 0], alone.scores, rtol=1e-5)
    assert all(len({tuple(text) for text in row}) > 3 for row in tokens.tolist())


@pytest.mark.parametrize("decoder", ["gpt2"], indirect=True)
def test_rows_with_other_keys_draw_other_tokens(talkative):
    batch = {name: np.repeat(values[:1], 8, axis=0) for name, values in prompts("left").items()}

    found = search(
        talkative, batch, sampling=Sampling(), rngs=jax.random.split(jax.random.key(0), 8)
    )

    assert len({tuple(row) for row in np.asarray(found.tokens).tolist()}) > 4


@pytest.mark.parametrize("decoder", ["gpt2"], indirect=True)
@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"num_beams": 2, "sampling": Sampling()}, "num_beams is 2; sampling follows one"),
        ({"sampling": Sampling()}, "sampling needs rngs: one key per row"),
    ],
)
def test_sampling_that_cannot_be_is_refused(talkative, how, message):
    with pytest.raises(ValueError, match=message):
        search(talkative, prompts("left"), **how)


@pytest.mark.parametrize("decoder", ["gpt2"], indirect=True)
def test_new_prompts_of_one_shape_compile_nothing(talkative):
    run = jax.jit(partial(generate, talkative.module, talkative.config, max_new_tokens=3))

    for side in ("left", "right"):
        run(talkative.params, *prompts(side).values())

    assert run._cache_size() == 1
