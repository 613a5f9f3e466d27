"""Batches of like length: which widths, and the same texts and likelihoods as from one width."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from stage_kinds import predict, preprocess, train

from redco_flow.engine.deployer import Deployer
from redco_flow.engine.predictor import Predictor
from redco_flow.metrics import rouge
from redco_flow.recipes.find import find_recipe
from redco_flow.recipes.recipe import Generation, RandomChoice
from redco_flow.runtime.context import Stopped
from redco_flow.stages.artifacts.predictions import read_predictions
from redco_flow.stages.length_bucketing import bucket_prompts, bucket_rows
from redco_flow.stages.preprocess.tokenizer import save_tokenizer, train_tokenizer
from redco_flow.text.tokenizer import TextTokenizer
from redco_flow.tracking.metrics_artifact import PREDICTIONS_FILE
from tests.drawn_params import draw_like

MODELS = {
    "t5": {"d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2},
    "gpt2": {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 400},
    "mistral": {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "sliding_window": 80,
    },
}  # fmt: skip
LONGEST = 300
BATCH_SIZE = 2


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(train_tokenizer(["a few words, and some more words"] * 9, 280, "bpe"), folder)
    return TextTokenizer.load(folder)


def recipe_of(tokenizer, family):
    name = "text_to_text" if family == "t5" else "language_modeling"
    model = {"family": family, "config": MODELS[family]}
    return find_recipe(name).build(model, tokenizer, source_length=LONGEST, target_length=8)


def prompts(lengths):
    ids = np.random.default_rng(1).integers(3, 280, (len(lengths), LONGEST)).astype(np.int32)
    return [
        {"row_id": f"x:{row}", "source_ids": ids[row, :length], "target_ids": [1]}
        for row, length in enumerate(lengths)
    ]


# Short ones, some of a middle length, and one as long as can be.
LENGTHS = [5 + 7 * i % 50 for i in range(30)] + [LONGEST] + [70 + i for i in range(17)]


def test_widths_are_multiples_of_64_as_many_as_the_batches_repay_and_the_last_is_the_recipes(
    tokenizer,
):
    recipe, examples = recipe_of(tokenizer, "gpt2"), prompts(LENGTHS)

    found = bucket_prompts(recipe, examples, BATCH_SIZE)

    widths = [collate_fn(prompts([5]))["input_ids"].shape[1] for collate_fn in found.collate_fns]
    (_, widest) = recipe.collate_prompts(examples[:1])["input_ids"].shape
    assert widths == [64, 128, widest]
    assert found.buckets.batches_per_bucket(BATCH_SIZE) == [15, 8, 1]
    # With fewer batches one width more is repaid, and with fewer still none.
    assert len(bucket_prompts(recipe, examples[::2] + examples[:8], BATCH_SIZE).collate_fns) == 2
    assert bucket_prompts(recipe, examples[:31], BATCH_SIZE) is None


@pytest.mark.parametrize(
    ("family", "expected"),
    # A decoder's row holds both, without the last token; else each side has its own width.
    [("gpt2", [(40,), (88,), (304,)]), ("t5", [(40, 8), (88, 8), (304, 8)])],
)
def test_rows_are_as_wide_as_their_longest_needs(tokenizer, family, expected):
    recipe, examples = recipe_of(tokenizer, family), prompts(LENGTHS)

    found = bucket_rows(recipe, examples, BATCH_SIZE)

    assert list(found.buckets.widths) == expected
    assert [collate_fn(prompts([5]))["input_ids"].shape[1] for collate_fn in found.collate_fns] == [
        width for width, *_ in expected
    ]
    assert bucket_rows(recipe, examples[:31], BATCH_SIZE) is None


@pytest.mark.slow
def test_likelihoods_are_those_of_one_width_and_each_width_is_compiled_once(tokenizer):
    """Engine case 45, of likelihoods. A T5's: `test_the_validation_loss_of_a_training` below."""
    recipe, examples = recipe_of(tokenizer, "mistral"), prompts(LENGTHS)
    params = draw_like(recipe.abstract_params())
    traced = []

    def likelihoods(params, batch, rngs):
        traced.append(batch["input_ids"].shape)
        return recipe.loss_fn(params, batch, rngs, False)

    predictor = Predictor(
        Deployer(devices=jax.devices()[:1]),
        collate_fn=recipe.collate_fn,
        pred_fn=likelihoods,
        batch_size=BATCH_SIZE,
    )
    bucketing = bucket_rows(recipe, examples, BATCH_SIZE)

    found = predictor.predict(examples, params, bucketing=bucketing)
    predictor.predict(examples, params, bucketing=bucketing)

    assert len(traced) == len(bucketing.collate_fns) == 3
    expected = np.array(predictor.predict(examples, params))
    assert len(set(expected[:, 0].tolist())) == len(examples)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_a_recipe_with_one_width_of_prompts_keeps_it(tokenizer):
    recipe = replace(recipe_of(tokenizer, "t5"), prompt_widths=None, collate_prompts_to=None)

    assert bucket_prompts(recipe, prompts(LENGTHS), BATCH_SIZE) is None


@pytest.mark.slow
def test_sampled_texts_are_those_of_one_width_token_for_token(tokenizer):
    """Those that a T5 is sure of: `test_predictions_are_bitwise_those_of_batches_of_one_width`."""
    recipe, examples = recipe_of(tokenizer, "mistral"), prompts(LENGTHS)
    # So large that texts follow their prompts.
    params = jax.tree.map(lambda x: 4 * x, draw_like(recipe.abstract_params()))
    predictor = Predictor(
        Deployer(devices=jax.devices()[:1]),
        collate_fn=recipe.collate_prompts,
        pred_fn=recipe.make_pred_fn(Generation(6, sampling=RandomChoice(1.2, 100, 0.95))),
        batch_size=BATCH_SIZE,
    )

    found = predictor.predict(
        examples, params, bucketing=bucket_prompts(recipe, examples, BATCH_SIZE)
    )

    np.testing.assert_array_equal(found, predictor.predict(examples, params))
    assert len({tuple(tokens.tolist()) for tokens in found}) > len(found) // 2


SETTINGS = {
    "model": {"config": MODELS["t5"]},
    "num_epochs": 6,
    "global_batch_size": 8,
    "learning_rate": 0.02,
    "keep": {"best": ["rouge1"]},
    "eval": {"every_epochs": 6},
}
WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight"]


@pytest.fixture(scope="module")
def trained(shared_bench, write_rows):
    """A dataset with long sources among short ones, a checkpoint, and its training's scores.

    Trained so far that texts differ by what they are generated from.
    """
    bench = shared_bench
    rows = [
        (" ".join([word, other] * (30 if i % 7 == 3 else 2)), word)
        for i, word in enumerate(WORDS * 2)
        for other in WORDS
    ]
    data = {
        "train": str(write_rows(bench.root / "train.jsonl", rows)),
        "validation": str(write_rows(bench.root / "validation.jsonl", rows)),
        "tokenizer": {"train": {"vocab_size": 290, "type": "bpe"}},
    }
    lengths = {"max_source_length": 100, "max_target_length": 8}
    dataset = bench.run(preprocess, {"data": data} | lengths)["dataset"]
    checkpoint = bench.run(train, SETTINGS, {"dataset": [dataset]})["checkpoint/last"]
    scores = [record for record in bench.records() if record["kind"] == "evaluation"][-1]["metrics"]
    return {"dataset": [dataset], "checkpoint": [checkpoint]}, scores


@pytest.fixture(scope="module")
def bucketed(shared_bench, trained):
    """Sixteen batches, which repay a second width."""
    return shared_bench.run(predict, {"batch_size": 8}, trained[0])


@pytest.fixture(scope="module")
def plain(shared_bench, trained):
    """Four batches, which do not."""
    return shared_bench.run(predict, {"batch_size": 32}, trained[0])


def lines_of(artifact):
    return (artifact["predictions"].path / PREDICTIONS_FILE).read_bytes()


@pytest.mark.slow
def test_predictions_are_bitwise_those_of_batches_of_one_width(bucketed, plain):
    assert lines_of(bucketed) == lines_of(plain)
    assert lines_of(bucketed).count(b"\n") == 128


@pytest.mark.slow
def test_the_scores_of_a_training_are_those_of_texts_from_one_width(trained, plain):
    """Engine case 52; the training's batches are of eight, so it generates in two widths."""
    _, scores = trained

    lines, _ = read_predictions(plain["predictions"].path)
    found = rouge.compute([line.prediction for line in lines], [line.references for line in lines])
    assert {name: scores[name] for name in found} == found
    assert len({line.prediction for line in lines}) > 4
    assert found["rouge1"] > 0


@pytest.mark.slow
def test_the_validation_loss_of_a_training_is_that_of_likelihoods_from_one_width(bench, trained):
    """Engine case 27; the training's batches are of eight, so it measures in two widths."""
    inputs, scores = trained

    asked = {"score_targets": True, "split": "validation"}
    plain = bench.run(predict, {**asked, "batch_size": 32}, inputs)["predictions"]
    bucketed = bench.run(predict, {**asked, "batch_size": 8}, inputs)["predictions"]

    lines, _ = read_predictions(plain.path)
    mean = sum(line.loss for line in lines) / sum(line.num_tokens for line in lines)
    assert scores["eval_loss"] == pytest.approx(mean, rel=1e-5)
    again, _ = read_predictions(bucketed.path)
    assert [line.row_id for line in again] == [line.row_id for line in lines]
    assert [line.num_tokens for line in again] == [line.num_tokens for line in lines]
    np.testing.assert_allclose(
        [line.loss for line in again], [line.loss for line in lines], rtol=1e-5
    )
    assert len({line.loss for line in lines}) > len(lines) // 2


@pytest.mark.slow
def test_a_prediction_that_was_stopped_midway_gives_the_same_file_when_run_again(
    bench, trained, bucketed, stop_at_look
):
    inputs, _ = trained
    context = bench.context("predict", inputs, work="stopped")
    context.stop = stop_at_look(3)  # with the third batch

    with pytest.raises(Stopped):
        predict.run(context, predict.Config.from_json({"batch_size": 8}))
    again = bench.run(predict, {"batch_size": 8}, inputs, work="stopped")

    assert lines_of(again) == lines_of(bucketed)
