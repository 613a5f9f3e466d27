from __future__ import annotations

import itertools
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from redco_flow.models.find import find_model
from redco_flow.models.generation.generate import (
    LogitsProcessing,
    beam_search,
    generate,
    token_search,
)

t5 = find_model("t5")

MAX_NEW_TOKENS = 14
SOURCE_LENGTHS = (9, 3, 6, 1, 8, 5, 2, 7)
EOS, PAD = 1, 0
# What does not depend on the version is shown on one.
gated = pytest.mark.parametrize("config", ["v1.1"], indirect=True)


@pytest.fixture
def talkative(config, make_params, make_batch) -> tuple[t5.Config, dict[str, Any], dict[str, Any]]:
    """A model of so few tokens that some hypotheses end early and others run to the limit."""
    config = config.updated({"vocab_size": 11})
    batch = make_batch(SOURCE_LENGTHS, (1,) * len(SOURCE_LENGTHS))
    batch["input_ids"] = np.where(batch["attention_mask"], 2 + batch["input_ids"] % 9, PAD)
    return config, make_params(config, seed=1), batch


def search(config: t5.Config, params: dict[str, Any], batch: dict[str, Any], **how: Any) -> Any:
    return searching(config, **how)(params, batch["input_ids"], batch["attention_mask"])


@cache
def searching(config: t5.Config, **how: Any) -> Any:
    """Compile a search once for all tests that search so."""
    return jax.jit(partial(generate, t5, config, max_new_tokens=MAX_NEW_TOKENS, **how))


def torch_search(model: Any, batch: dict[str, Any], **how: Any) -> Any:
    import torch

    return model.generate(
        input_ids=torch.tensor(batch["input_ids"]),
        attention_mask=torch.tensor(batch["attention_mask"]),
        max_new_tokens=MAX_NEW_TOKENS,
        return_dict_in_generate=True,
        output_scores=True,
        **how,
    )


def until_end(tokens: Any) -> list[list[int]]:
    """Cut each row after its end token; transformers pads beams with end tokens."""
    rows = np.asarray(tokens).tolist()
    return [row[: row.index(EOS) + 1] if EOS in row else row for row in rows]


@gated
def test_greedy_tokens_equal_the_torch_reference(talkative, make_params, torch_model):
    config, _, batch = talkative
    params = make_params(config, seed=8)  # weights that end some rows early

    found = search(config, params, batch)

    expected = torch_search(torch_model(config, params), batch, do_sample=False)
    rows = until_end(found.tokens)
    assert rows == until_end(expected.sequences[:, 1:])
    assert len({len(row) for row in rows}) > 1, "the rows end at different lengths"


@pytest.mark.parametrize(
    ("config", "length_penalty", "early_stopping"),
    [
        ("v1.0", 1.0, False),
        ("v1.1", -1.0, "never"),
    ],
    indirect=["config"],
)
@pytest.mark.slow
def test_beams_equal_the_torch_reference(talkative, torch_model, length_penalty, early_stopping):
    config, params, batch = talkative
    how = {
        "num_beams": 4,
        "length_penalty": length_penalty,
        "early_stopping": early_stopping,
    }

    found = search(config, params, batch, **how)

    expected = torch_search(torch_model(config, params), batch, **how)
    assert until_end(found.tokens) == until_end(expected.sequences[:, 1:])
    np.testing.assert_allclose(found.scores, expected.sequences_scores, rtol=1e-5)


@gated
@pytest.mark.parametrize(
    ("num_beams", "rules"),
    [
        (1, {"min_new_tokens": 6}),
        (4, {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "min_new_tokens": 9}),
    ],
)
@pytest.mark.slow
def test_logits_processors_are_those_of_the_torch_reference(
    talkative, torch_model, num_beams, rules
):
    config, params, batch = talkative

    found = search(config, params, batch, num_beams=num_beams, processing=LogitsProcessing(**rules))

    how = {"num_beams": num_beams, "do_sample": False, **rules}
    expected = torch_search(torch_model(config, params), batch, **how)
    assert until_end(found.tokens) == until_end(expected.sequences[:, 1:])
    if num_beams > 1:
        np.testing.assert_allclose(found.scores, expected.sequences_scores, rtol=1e-5)
    plain = search(config, params, batch, num_beams=num_beams)
    assert until_end(found.tokens) != until_end(plain.tokens), "the rules change the texts"


@gated
def test_several_beams_of_a_row_are_those_of_the_torch_reference(talkative, torch_model):
    config, params, batch = talkative
    how = {"num_beams": 4, "num_return_sequences": 3, "early_stopping": True}

    found = search(config, params, batch, **how)

    expected = torch_search(torch_model(config, params), batch, **how)
    assert found.tokens.shape == (len(SOURCE_LENGTHS), 3, MAX_NEW_TOKENS)
    flat = np.asarray(found.tokens).reshape(-1, MAX_NEW_TOKENS)
    assert until_end(flat) == until_end(expected.sequences[:, 1:])
    np.testing.assert_allclose(
        np.asarray(found.scores).reshape(-1), expected.sequences_scores, rtol=1e-5
    )


@pytest.mark.slow
@gated
def test_a_row_is_decoded_alike_whatever_is_beside_it(talkative):
    config, params, batch = talkative
    together = search(config, params, batch, num_beams=4)

    row, length = 3, SOURCE_LENGTHS[3]
    alone = {name: values[row : row + 1] for name, values in batch.items()}
    alone |= {name: alone[name][:, :length] for name in ("input_ids", "attention_mask")}
    found = search(config, params, alone, num_beams=4)
    np.testing.assert_array_equal(found.tokens[0], together.tokens[row])


@gated
@pytest.mark.parametrize("num_beams", [1, 4])
def test_what_follows_the_end_token_is_padding(talkative, num_beams):
    config, params, batch = talkative

    tokens = np.asarray(search(config, params, batch, num_beams=num_beams).tokens)

    after_end = np.cumsum(tokens == EOS, axis=1) - (tokens == EOS) > 0
    assert after_end.any()
    assert (tokens[after_end] == PAD).all()


@gated
def test_new_batches_of_one_shape_compile_nothing(talkative):
    config, params, batch = talkative
    run = jax.jit(partial(generate, t5, config, max_new_tokens=5, num_beams=4))

    for shift in range(3):
        run(params, np.roll(batch["input_ids"], shift, axis=0), batch["attention_mask"])

    assert run._cache_size() == 1


@pytest.mark.slow
@gated
def test_the_source_is_read_once_and_not_at_every_step(talkative):
    config, params, batch = talkative

    @jax.jit
    def fresh_cache(ids: Any, mask: Any) -> Any:
        encoded = t5.encode(config, params, ids, mask)
        return t5.init_cache(config, params, encoded, mask, num_beams=2, max_length=3)

    cache = fresh_cache(batch["input_ids"], batch["attention_mask"])
    tokens = np.full((len(SOURCE_LENGTHS), 2), 5)
    poisoned = jax.tree.map(lambda leaf: leaf, params)
    poisoned["encoder"] = jax.tree.map(lambda leaf: leaf * np.nan, params["encoder"])
    poisoned["decoder"]["layers"]["cross_attention"]["kv"] *= np.nan

    step = jax.jit(t5.decode_step, static_argnums=0)
    expected, _ = step(config, params, cache, tokens, 0)
    found, _ = step(config, poisoned, cache, tokens, 0)

    np.testing.assert_array_equal(found, expected)


@gated
@pytest.mark.parametrize("name", ["max_new_tokens", "num_beams", "num_return_sequences"])
def test_a_count_below_one_is_refused(talkative, name):
    config, params, batch = talkative
    inputs = (batch["input_ids"], batch["attention_mask"])

    with pytest.raises(ValueError, match=f"{name} is 0; it must be at least 1"):
        generate(t5, config, params, *inputs, **{"max_new_tokens": 3, name: 0})


@gated
@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"num_return_sequences": 2}, "num_return_sequences is 2, and num_beams is 1"),
        ({"num_beams": 3, "num_return_sequences": 4}, "is 4, and num_beams is 3"),
        ({"processing": LogitsProcessing(min_new_tokens=4)}, "is 4, and at most 3 are generated"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(talkative, how, message):
    config, params, batch = talkative
    inputs = (batch["input_ids"], batch["attention_mask"])

    with pytest.raises(ValueError, match=message):
        generate(t5, config, params, *inputs, max_new_tokens=3, **how)


class ChainCache(NamedTuple):
    """The cache of a model whose next token depends on the last two: it remembers the first."""

    beams: jax.Array  # (B, N)
    num_steps: jax.Array


def chain_step(scores: jax.Array, cache: ChainCache, tokens: jax.Array, position: Any) -> Any:
    """Score the next token by (token before last, last token); a decoder of two lines."""
    logits = scores[cache.beams, tokens]
    return logits, ChainCache(tokens, cache.num_steps + 1)


def chain_cache(num_rows: int, num_beams: int) -> ChainCache:
    return ChainCache(jnp.zeros((num_rows, num_beams), jnp.int32), jnp.zeros((), jnp.int32))


SPECIAL = {"start_token_id": 0, "eos_token_id": EOS, "pad_token_id": PAD}


@pytest.mark.parametrize("length_penalty", [0.0, 1.0])
def test_enough_beams_find_the_best_of_all_sequences(length_penalty):
    vocab_size, max_length = 4, 4
    rng = np.random.default_rng(7)
    scores = rng.standard_normal((vocab_size,) * 3).astype(np.float32)
    log_probs = np.asarray(jax.nn.log_softmax(scores, axis=-1), np.float64)

    def worth(sequence: tuple[int, ...]) -> float:
        path = (0, 0, *sequence)
        total = sum(log_probs[path[i : i + 3]] for i in range(len(sequence)))
        return total / len(sequence) ** length_penalty

    whole = [
        sequence
        for length in range(1, max_length + 1)
        for sequence in itertools.product(range(vocab_size), repeat=length)
        if EOS not in sequence[:-1] and (sequence[-1] == EOS or length == max_length)
    ]
    best = max(whole, key=worth)

    found = beam_search(
        partial(chain_step, jnp.asarray(scores)),
        chain_cache(num_rows=1, num_beams=64),
        max_new_tokens=max_length,
        length_penalty=length_penalty,
        **SPECIAL,
    )

    assert until_end(found.tokens)[0] == list(best)
    np.testing.assert_allclose(found.scores[0], worth(best), rtol=1e-5)


def counting(steps: list[int], scores: np.ndarray) -> Any:
    """`chain_step` that notes at which positions it was called."""

    def counted_step(cache: Any, tokens: Any, position: Any) -> Any:
        jax.debug.callback(lambda p: steps.append(int(p)), position)
        return chain_step(jnp.asarray(scores), cache, tokens, position)

    return counted_step


@pytest.mark.parametrize(("search", "num_beams"), [(token_search, 1), (beam_search, 2)])
def test_the_loop_ends_when_every_row_has(search, num_beams):
    steps: list[int] = []
    always_end = np.zeros((4, 4, 4), np.float32)
    always_end[..., EOS] = 10.0

    step = counting(steps, always_end)
    found = search(step, chain_cache(3, num_beams), max_new_tokens=50, **SPECIAL)
    jax.effects_barrier()

    assert until_end(found.tokens) == [[EOS]] * 3
    # A beam that ends takes the second place one token later.
    assert steps == list(range(num_beams))


@pytest.mark.parametrize(("early_stopping", "num_steps"), [(True, 2), (False, 6), ("never", 6)])
def test_early_stopping_ends_a_row_though_a_longer_text_may_be_better(early_stopping, num_steps):
    steps: list[int] = []
    ends_or_goes_on = np.full((4, 4, 4), -20.0, np.float32)
    ends_or_goes_on[..., [EOS, 3]] = 0.0

    beam_search(
        counting(steps, ends_or_goes_on),
        chain_cache(3, 2),
        max_new_tokens=6,
        length_penalty=2.0,
        early_stopping=early_stopping,
        **SPECIAL,
    )
    jax.effects_barrier()

    assert steps == list(range(num_steps))


def test_what_stops_later_finds_better_texts_where_length_is_favoured():
    # Scores with which each of the three stops elsewhere.
    scores = 2 * np.random.default_rng(42).standard_normal((4, 4, 4)).astype(np.float32)
    num_steps, worth = [], []

    for early_stopping in (True, False, "never"):
        steps: list[int] = []
        found = beam_search(
            counting(steps, scores),
            chain_cache(1, 2),
            max_new_tokens=10,
            length_penalty=2.0,
            early_stopping=early_stopping,
            **SPECIAL,
        )
        jax.effects_barrier()
        num_steps.append(len(steps))
        worth.append(float(found.scores[0]))

    assert num_steps == sorted(set(num_steps))
    assert worth == sorted(set(worth))


def test_of_equally_likely_tokens_the_first_is_taken_and_none_beyond_the_vocabulary():
    logits = np.full((4, 4, 4), 1.0, np.float32)
    logits[0, 0], logits[0, 2] = (0.0, -1.0, 3.0, 3.0), (np.nan, 0.0, 0.0, 0.0)

    found = token_search(
        partial(chain_step, jnp.asarray(logits)), chain_cache(1, 1), max_new_tokens=2, **SPECIAL
    )

    first, after_nan = np.asarray(found.tokens)[0].tolist()
    assert first == 2
    assert after_nan < 4
