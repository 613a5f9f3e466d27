"""A tiny GPT-2 through the stages: instruction tuning, plain texts, packing, buckets, sampling."""

import json
import math
import shutil

import jax
import numpy as np
import pytest
from stage_kinds import evaluate, predict, preprocess, train

from redco_flow.engine.deployer import Deployer
from redco_flow.engine.errors import DataError
from redco_flow.spec.load import settings_of
from redco_flow.stages.artifacts.checkpoint import CheckpointArtifact
from redco_flow.stages.artifacts.dataset import DatasetArtifact
from redco_flow.stages.artifacts.predictions import read_predictions
from redco_flow.stages.evaluate.run import CannotEvaluate
from redco_flow.stages.predict.run import CannotPredict
from redco_flow.stages.train.scores import CannotTrain
from redco_flow.tracking.metrics_artifact import read_metrics

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight"]
# Of different lengths, so that padding, buckets and packed rows differ.
ROWS = [
    (f"{a} {b} {c}", " ".join([b] * (1 + i % 4)))
    for i, a in enumerate(WORDS)
    for b in WORDS
    for c in ("up", "down")
]
TINY = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64}
RECIPE = {"recipe": "language_modeling"}
SETTINGS = RECIPE | {
    "model": {"family": "gpt2", "config": TINY},
    "num_epochs": 2,
    "global_batch_size": 8,
    "learning_rate": 0.01,
    "dropout_rate": 0.1,
    "keep": {"best": ["perplexity"]},
    "log_every_steps": 3,
}
DATA = {"validation_fraction": 0.2, "test_fraction": 0.2}
TOKENIZER = {"train": {"vocab_size": 280, "type": "bpe"}}


@pytest.fixture(scope="module")
def dataset(shared_bench, write_rows):
    path = write_rows(shared_bench.root / "pairs.jsonl", ROWS)
    data = {"train": str(path), "tokenizer": TOKENIZER, "source_suffix": " :", **DATA}
    lengths = {"max_source_length": 16, "max_target_length": 16}
    return shared_bench.run(preprocess, RECIPE | {"data": data} | lengths)["dataset"]


@pytest.fixture(scope="module")
def texts(shared_bench):
    path = shared_bench.root / "texts.jsonl"
    lines = [json.dumps({"text": f"{a} {b} " * 8}) + "\n" for a in WORDS for b in WORDS]
    path.write_text("".join(lines))
    data = {"train": str(path), "tokenizer": TOKENIZER, "text_key": "text", **DATA}
    return shared_bench.run(preprocess, RECIPE | {"data": data, "max_target_length": 24})["dataset"]


@pytest.fixture(scope="module")
def trained(shared_bench, dataset):
    checkpoints = shared_bench.run(train, SETTINGS, {"dataset": [dataset]})
    return checkpoints, shared_bench.records()


@pytest.fixture(scope="module")
def trained_on_texts(shared_bench, texts):
    """The checkpoint, and the directory of its attempt."""
    pytest.importorskip("tensorboardX", reason="pip install redco-flow[tensorboard]")
    settings = SETTINGS | {"log_to": ["tensorboard"]}
    checkpoint = shared_bench.run(train, settings, {"dataset": [texts]})["checkpoint/last"]
    return checkpoint, shared_bench.metrics_path.parent


def losses_of(records):
    return [record["loss"] for record in records if record["kind"] == "training"]


def last_scores(records):
    return [record for record in records if record["kind"] == "evaluation"][-1]["metrics"]


def params_of(artifact):
    checkpoint = CheckpointArtifact(artifact.path)
    return checkpoint.load_params(checkpoint.build_recipe(), Deployer())


@pytest.mark.slow
@pytest.mark.covers("stages by themselves", family="gpt2", recipe="language_modeling")
def test_an_instruction_tuned_gpt2_is_trained_predicts_and_is_evaluated(bench, dataset, trained):
    checkpoints, records = trained
    inputs = {"dataset": [dataset], "checkpoint": [checkpoints["checkpoint/best/perplexity"]]}

    split = {"split": "validation"}
    predictions = bench.run(predict, RECIPE | split | {"num_beams": 2}, inputs)["predictions"]
    settings = {"metrics": ["bleu", "perplexity"]}
    metrics = bench.run(evaluate, settings, {"predictions": [predictions]})["metrics"]

    losses = losses_of(records)
    assert losses[-1] < losses[0]
    scores = last_scores(records)
    assert scores["perplexity"] == pytest.approx(math.exp(scores["eval_loss"]))
    # What evaluation finds on the same split, through other batches: float32 sums.
    summary, lines = read_metrics(metrics.path)
    assert summary.metrics["perplexity"] == pytest.approx(scores["perplexity"], rel=1e-5)
    assert summary.directions["perplexity"] == "min"
    assert {"bleu", "perplexity"} <= set(lines[0]["scores"]) | set(lines[0]["statistics"])
    assert set(summary.baselines["copy_source"]["metrics"]) == {"bleu"}


@pytest.mark.slow
def test_plain_texts_are_trained_on_whole_and_continued(bench, texts, trained_on_texts):
    checkpoint, _ = trained_on_texts
    inputs = {"dataset": [texts], "checkpoint": [checkpoint]}
    settings = RECIPE | {"split": "validation", "prompt_length": 5, "batch_size": 8}

    predictions = bench.run(predict, settings, inputs)["predictions"]

    scores = CheckpointArtifact(checkpoint.path).record.metrics
    lines, _ = read_predictions(predictions.path)
    rows = DatasetArtifact(texts.path).split("validation")
    # Each token once: the pieces of a text are its whole.
    assert sum(line.num_tokens for line in lines) == sum(len(row["target_ids"]) for row in rows)
    mean = sum(line.loss for line in lines) / sum(line.num_tokens for line in lines)
    assert math.exp(mean) == pytest.approx(scores["perplexity"], rel=1e-5)
    for line, row in zip(lines, rows, strict=True):
        said = f"{line.source} {line.references[0]}".split()
        assert "".join(said) == "".join(row["references"][0].split())


def corpus_loss(bench, dataset, batching):
    """The mean loss over all training tokens, by a training that changes nothing.

    Also the number of steps, the validation loss, and the checkpoint.
    """
    frozen = {"optimizer": "sgd", "learning_rate": 1e-12, "dropout_rate": 0.0, "num_epochs": 1}
    settings = SETTINGS | frozen | {"batching": batching, "log_every_steps": 1000, "keep": {}}
    checkpoint = bench.run(train, settings, {"dataset": [dataset]})["checkpoint/last"]
    (record,) = [record for record in bench.records() if record["kind"] == "training"]
    return record["loss"], record["step"], last_scores(bench.records())["eval_loss"], checkpoint


@pytest.mark.slow
def test_packed_and_bucketed_batches_have_the_loss_per_token_of_padded_ones(bench, dataset):
    """Engine case 34: the loss is that of each document alone."""
    bucketed = corpus_loss(bench, dataset, {"type": "bucketed", "num_buckets": 3})
    packed = corpus_loss(bench, dataset, {"type": "packed"})

    recipe = CheckpointArtifact(packed[3].path).build_recipe()
    params = params_of(packed[3])
    train_rows, validation = (
        DatasetArtifact(dataset.path).split(name)[:] for name in ("train", "validation")
    )

    def loss_of(rows):
        batch = recipe.collate_fn(rows)
        totals, weights = jax.jit(lambda p, b: recipe.loss_fn(p, b, None, False))(params, batch)
        return float(totals.sum() / weights.sum()), batch

    padded, batch = loss_of(train_rows)
    # 1e-5: float32 sums in other orders.
    assert bucketed[0] == pytest.approx(padded, rel=1e-5)
    assert packed[0] == pytest.approx(padded, rel=1e-5)
    assert packed[2] == pytest.approx(loss_of(validation)[0], rel=1e-5)
    num_rows, width = batch["input_ids"].shape
    assert bucketed[1] == math.ceil(num_rows / 8) > packed[1]
    num_tokens = sum(len(row["source_ids"]) + len(row["target_ids"]) - 1 for row in train_rows)
    padding = 1 - num_tokens / (num_rows * width)
    assert 0 < bucketed[3].metadata["padding"] < padding
    assert 0 < packed[3].metadata["padding"] < padding


@pytest.mark.slow
@pytest.mark.covers(
    "stages by themselves", family="llama", recipe="language_modeling", mesh="model"
)
def test_a_llama_learns_by_low_rank_factors_on_packed_rows_over_two_shards(bench, dataset):
    config = {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2,
    }  # fmt: skip
    settings = SETTINGS | {
        "model": {"family": "llama", "config": config},
        "lora": {"rank": 2, "targets": "attention/(q|kv|out)$"},
        "batching": {"type": "packed", "packed_length": 48},
        "num_model_shards": 2,
        "dropout_rate": 0.0,
        "learning_rate": 0.1,
    }

    checkpoint = bench.run(train, settings, {"dataset": [dataset]})["checkpoint/last"]
    losses = losses_of(bench.records())
    inputs = {"dataset": [dataset], "checkpoint": [checkpoint]}
    sampling = {"do_sample": True, "top_p": 0.9, "num_model_shards": 2}
    predictions = bench.run(predict, RECIPE | sampling, inputs)["predictions"]

    assert losses[-1] < losses[0]
    lines, summary = read_predictions(predictions.path)
    assert len(lines) == summary.num_examples > 0
    assert summary.generation["top_p"] == 0.9


@pytest.mark.slow
def test_sampled_texts_depend_on_the_seed_and_not_on_the_batch(bench, dataset, trained):
    checkpoints, _ = trained
    inputs = {"dataset": [dataset], "checkpoint": [checkpoints["checkpoint/last"]]}
    sampling = RECIPE | {"do_sample": True, "temperature": 1.5, "top_k": 100, "top_p": 0.95}

    def texts(**settings):
        predictions = bench.run(predict, sampling | settings, inputs)["predictions"]
        return [line.prediction for line in read_predictions(predictions.path)[0]]

    drawn = texts(batch_size=8)

    assert texts(batch_size=16) == drawn
    assert texts(batch_size=16, seed=1) != drawn


@pytest.mark.slow
def test_each_setting_of_sampling_reaches_the_draw(bench, dataset, trained):
    """Where one of them leaves the likeliest token alone, the texts are those of no sampling."""
    checkpoints, _ = trained
    inputs = {"dataset": [dataset], "checkpoint": [checkpoints["checkpoint/last"]]}
    asked = RECIPE | {"num_examples": 8, "score_targets": False}

    def texts(**settings):
        predictions = bench.run(predict, asked | settings, inputs)["predictions"]
        return [line.prediction for line in read_predictions(predictions.path)[0]]

    greedy = texts()

    for narrowed in ({"temperature": 1e-6}, {"top_k": 1}, {"top_p": 1e-6}):
        assert texts(do_sample=True, **narrowed) == greedy, narrowed


@pytest.mark.slow
def test_metrics_score_the_first_of_several_texts_and_the_file_has_all(bench, dataset, trained):
    checkpoints, _ = trained
    inputs = {"dataset": [dataset], "checkpoint": [checkpoints["checkpoint/last"]]}
    asked = RECIPE | {"num_examples": 8, "score_targets": False, "num_beams": 3}

    def predicted(**settings):
        return bench.run(predict, asked | settings, inputs)["predictions"]

    def scores_of(predictions):
        settings = {"metrics": ["bleu", "exact_match"]}
        metrics = bench.run(evaluate, settings, {"predictions": [predictions]})["metrics"]
        return read_metrics(metrics.path)[0].metrics

    one, several = predicted(), predicted(num_return_sequences=3)

    alone, _ = read_predictions(one.path)
    lines, summary = read_predictions(several.path)
    assert [line.prediction for line in lines] == [line.prediction for line in alone]
    assert all(line.predictions[0] == line.prediction for line in lines)
    assert all(len(line.predictions) == 3 for line in lines)
    assert any(len(set(line.predictions)) > 1 for line in lines)
    assert all(line.predictions is None for line in alone)
    assert scores_of(several) == scores_of(one)
    assert summary.generation["num_return_sequences"] == 3
    split = predicted(num_return_sequences=3, fsdp=4, batch_size=8)
    assert read_predictions(split.path)[0] == lines
    ruled = predicted(repetition_penalty=3.0, no_repeat_ngram_size=1, min_new_tokens=4)
    assert read_predictions(ruled.path)[0] != alone


@pytest.mark.slow
def test_every_text_is_cut_before_the_first_stop_string_that_it_has(bench, dataset, trained):
    checkpoints, _ = trained
    inputs = {"dataset": [dataset], "checkpoint": [checkpoints["checkpoint/last"]]}
    asked = {"num_examples": 8, "score_targets": False, "num_beams": 2, "num_return_sequences": 2}

    def texts(**settings):
        predictions = bench.run(predict, RECIPE | asked | settings, inputs)["predictions"]
        lines, summary = read_predictions(predictions.path)
        return [text for line in lines for text in line.predictions], summary.generation

    whole, generation = texts()
    stop = max(whole, key=len)[1:3]
    cut, generation_with_stop = texts(stop=["never to be seen", stop])

    assert cut == [text.partition(stop)[0].rstrip() for text in whole]
    assert cut != whole
    assert "stop" not in generation
    assert generation_with_stop["stop"] == ["never to be seen", stop]


def test_perplexity_of_predictions_that_were_not_scored_is_an_error(bench, dataset, trained):
    checkpoints, _ = trained
    inputs = {"dataset": [dataset], "checkpoint": [checkpoints["checkpoint/last"]]}
    settings = RECIPE | {"score_targets": False, "num_examples": 2, "max_target_length": 2}
    predictions = bench.run(predict, settings, inputs)["predictions"]

    with pytest.raises(CannotEvaluate, match="set score_targets: true in the predict stage"):
        bench.run(evaluate, {"metrics": ["perplexity"]}, {"predictions": [predictions]})


def test_texts_without_targets_are_not_generated_for_metrics(bench, texts):
    settings = SETTINGS | {"eval": {"metrics": ["bleu"]}}

    with pytest.raises(CannotTrain, match=r"plain texts, which have no targets .* for bleu"):
        bench.run(train, settings, {"dataset": [texts]})


def test_a_prompt_as_long_as_the_texts_is_an_error(bench, texts, trained_on_texts):
    inputs = {"dataset": [texts], "checkpoint": [trained_on_texts[0]]}

    with pytest.raises(CannotPredict, match="prompt_length is 24, and the dataset's texts have at"):
        bench.run(predict, RECIPE | {"prompt_length": 24}, inputs)


@pytest.mark.slow
def test_losses_and_scores_go_to_an_event_file_beside_the_attempts_records(trained_on_texts):
    (events,) = (trained_on_texts[1] / "tensorboard").iterdir()
    data = events.read_bytes()
    assert b"train/loss" in data
    assert b"val/perplexity" in data


def test_an_example_longer_than_a_packed_row_is_an_error_before_any_step(bench, dataset):
    settings = SETTINGS | {"batching": {"type": "packed", "packed_length": 3}}

    with pytest.raises(DataError, match="a packed row takes 1 to 3"):
        bench.run(train, settings, {"dataset": [dataset]})


@pytest.mark.parametrize(
    ("stage", "settings", "message"),
    [
        (train, RECIPE | {"model": {"family": "bart"}}, "for 'bart' use recipe text_to_t"),
        (train, {"model": {"family": "llama"}}, "for 'llama' use recipe language_m"),
        (train, {"batching": {"type": "packed"}}, "cannot put several examples into one row"),
        (train, RECIPE | {"batching": {"packed_length": 8}}, "for type packed, and the type is p"),
        (train, {"keep": {"best": ["perplexity"]}}, "measures no perplexity; eval_loss"),
        (preprocess, {"data": {"train": "x", "text_key": "t"}}, "'text_to_text' takes pairs"),
        (
            preprocess,
            RECIPE | {"data": {"train": "x", "text_key": "t", "group_by_source": True}},
            "plain texts, and 'group_by_source' for pairs of",
        ),
        (predict, {"do_sample": True, "num_beams": 2}, "sampling follows one text per example"),
        (predict, {"top_k": 5, "top_p": 0.5}, "top_k, top_p change nothing without 'do_sample"),
        (predict, {"num_return_sequences": 2}, "num_return_sequences is 2 and num_beams 1"),
        (predict, {"early_stopping": True}, "changes nothing without num_beams above 1"),
        (predict, {"num_beams": 2, "early_stopping": "always"}, "early_stopping"),
        (predict, {"min_new_tokens": 5, "max_target_length": 4}, "5, above max_target_length, 4"),
        (predict, {"batch_size": 0}, "greater than 0"),
        (predict, {"batch_size": "8"}, "valid integer"),
    ],
)  # fmt: skip
def test_settings_that_cannot_work_are_refused_when_they_are_read(stage, settings, message):
    """Engine case 4, among others."""
    with pytest.raises(ValueError, match=message):
        stage.Config.from_json(settings)


def test_the_model_in_a_local_directory_is_checked_when_the_settings_are_read(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    model = {"name_or_path": str(tmp_path)}

    with pytest.raises(ValueError, match="recipe 'text_to_text' trains t5, bart, and not 'llama'"):
        train.Config.from_json({"model": model})

    assert train.Config.from_json(RECIPE | {"model": model}).model.name_or_path == str(tmp_path)


def test_batching_determines_the_result_and_logs_do_not():
    plain = settings_of(train.Config.from_json(SETTINGS))
    packed = settings_of(train.Config.from_json(SETTINGS | {"batching": {"type": "packed"}}))
    logged = settings_of(train.Config.from_json(SETTINGS | {"log_to": ["tensorboard"]}))

    assert packed != plain
    assert logged == plain


@pytest.fixture
def pretrained(bench, trained):
    """The trained model as a directory, with a tokenizer that has no padding token: GPT-2's."""
    checkpoint = CheckpointArtifact(trained[0]["checkpoint/last"].path)
    recipe = checkpoint.build_recipe()
    folder = bench.root / "pretrained"
    recipe.save_pretrained(checkpoint.load_params(recipe, Deployer()), folder)
    shutil.copytree(checkpoint.path / "tokenizer", folder, dirs_exist_ok=True)
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    del tokenizer["pad_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    return folder


@pytest.mark.slow
def test_a_model_in_a_directory_is_finetuned_with_its_own_tokenizer(
    bench, write_rows, trained, pretrained
):
    path = write_rows(bench.root / "pairs.jsonl", ROWS[:40])
    model = {"name_or_path": str(pretrained)}
    data = {"train": str(path), **DATA}
    lengths = {"max_source_length": 16, "max_target_length": 16}
    dataset = bench.run(preprocess, RECIPE | {"data": data, "model": model} | lengths)["dataset"]
    # At such a rate a step moves no parameter further than the tolerance.
    settings = SETTINGS | {"model": model, "learning_rate": 1e-9, "num_epochs": 1}

    checkpoint = bench.run(train, settings, {"dataset": [dataset]})["checkpoint/last"]

    before, after = params_of(trained[0]["checkpoint/last"]), params_of(checkpoint)
    for one, two in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        np.testing.assert_allclose(one, two, atol=1e-7)
