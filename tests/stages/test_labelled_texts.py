"""Texts with a class or a number: from a file to a score beside its baseline, on 1 and 2 shards."""

import json
from functools import partial

import jax
import numpy as np
import pytest
import scipy.special
from stage_kinds import evaluate, predict, preprocess, train

from redco_flow.engine.deployer import Deployer
from redco_flow.errors import ConfigError
from redco_flow.models import classifier
from redco_flow.models.classifier import ClassifierConfig
from redco_flow.models.find import find_model
from redco_flow.spec.load import load_pipeline
from redco_flow.stages.artifacts.checkpoint import CheckpointArtifact
from redco_flow.stages.artifacts.dataset import DatasetArtifact
from redco_flow.stages.artifacts.hugging_face import ExportRequest, write
from redco_flow.stages.artifacts.predictions import read_predictions
from redco_flow.stages.data.rows import BadRows

WORDS = ["red", "green", "blue", "black", "white", "grey"]
SIZES = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
MODEL = {"config": {**SIZES, "intermediate_size": 64, "max_position_embeddings": 32}}
TRAIN = {"model": MODEL, "num_epochs": 5, "global_batch_size": 16, "learning_rate": 5e-3}
TRAIN |= {"dropout_rate": 0.0, "schedule": {"type": "constant"}}


def pairs_of_words(num_rows=400):
    """Rows whose second text is a colour, or not, and more or less of it."""
    source = np.random.default_rng(0)
    for number in range(num_rows):
        word = source.choice(WORDS)
        more = " and more of it" * (number % 3)
        yield {
            "question": f"is it number {number % 7} in colour",
            "answer": f"it is {word}{more}",
            "in_colour": "yes" if word in ("red", "green", "blue") else "no",
            "length": len(more) / 10,
        }


def write_rows(folder, rows):
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def data_of(path, **changes):
    keys = {"source_key": "question", "pair_key": "answer", "target_key": "in_colour"}
    section = {"train": path, "validation_fraction": 0.1, "test_fraction": 0.2, **keys}
    return section | {"tokenizer": {"train": {"vocab_size": 300, "type": "bpe"}}} | changes


@pytest.fixture(scope="module")
def dataset(shared_bench):
    path = write_rows(shared_bench.root, pairs_of_words())
    config = {"recipe": "classification", "data": data_of(path), "max_source_length": 24}
    return shared_bench.run(preprocess, config)["dataset"]


def losses(bench):
    return [record["loss"] for record in bench.records() if record.get("kind") == "training"]


def scores_of(bench, dataset, checkpoint, recipe, metrics, **settings):
    inputs = {"dataset": [dataset], "checkpoint": [checkpoint]}
    predictions = bench.run(predict, {"recipe": recipe}, inputs)["predictions"]
    config = {"metrics": metrics, "metric_settings": settings}
    scored = bench.run(evaluate, config, {"predictions": [predictions]})
    summary = json.loads((scored["metrics"].path / "metrics.json").read_text())
    return read_predictions(predictions.path)[0], summary


def test_a_dataset_of_pairs_keeps_both_texts_the_label_and_the_classes(dataset):
    artifact = DatasetArtifact(dataset.path)
    row = artifact.split("train")[0]

    assert artifact.summary.classes == ["no", "yes"]
    assert row["source"].split("\0")[0].startswith("is it ")
    assert row["references"] in (["no"], ["yes"])
    # Our own tokenizer's template has one type of tokens: all stand in the source's ids.
    assert artifact.tokenizer.decode_batch([row["source_ids"]]) == [
        row["source"].replace("\0", " ")
    ]


CLASSIFY = TRAIN | {"recipe": "classification", "log_every_steps": 1}


@pytest.fixture(scope="module")
def trained(shared_bench, dataset):
    """A classifier's checkpoint, and the losses of its training."""
    made = shared_bench.run(train, CLASSIFY, {"dataset": [dataset]})
    return made["checkpoint/last"], losses(shared_bench)


@pytest.mark.slow
@pytest.mark.covers("one device", family="bert", mesh="model", recipe="classification")
def test_two_model_shards_train_as_one_does(shared_bench, dataset, trained):
    """Engine case 12: losses agree within 1e-5 relative, float32."""
    settings = CLASSIFY | {"max_steps": 6, "num_model_shards": 2}
    del settings["num_epochs"]

    shared_bench.run(train, settings, {"dataset": [dataset]})

    np.testing.assert_allclose(losses(shared_bench), trained[1][:6], rtol=1e-5)


@pytest.mark.slow
def test_an_exported_classifier_gives_transformers_the_same_scores(
    shared_bench, dataset, trained, tmp_path
):
    """Engine case 64: an exported model, read again by transformers, gives the same logits."""
    torch = pytest.importorskip("torch", reason="pip install torch==2.13.0 (extra: reference)")
    import transformers

    transformers.utils.logging.disable_progress_bar()
    artifact = CheckpointArtifact(trained[0].path)
    recipe = artifact.build_recipe()
    params = artifact.load_params(recipe, Deployer(devices=jax.devices()[:1]))
    batch = recipe.collate_fn(DatasetArtifact(dataset.path).split("test")[:8])

    write(ExportRequest(str(artifact.path), str(tmp_path), "model"))
    model = transformers.BertForSequenceClassification.from_pretrained(tmp_path).eval()
    inputs = {name: torch.tensor(values) for name, values in batch.items() if name != "labels"}
    with torch.no_grad():
        scores = model(**inputs).logits.numpy()

    inner = find_model("bert").Config().updated(artifact.record.model["config"])
    config = ClassifierConfig.of("bert", inner, artifact.record.model["labels"])
    batch.pop("labels")
    found = jax.jit(partial(classifier.apply, config))(params, **batch)
    np.testing.assert_allclose(found, scores, rtol=0, atol=1e-5 * np.abs(scores).max())
    assert model.config.id2label == {0: "no", 1: "yes"}
    given = {"dataset": [dataset], "checkpoint": [trained[0]]}
    asked = {"recipe": "classification", "num_examples": 8, "probabilities": True}
    lines, _ = read_predictions(shared_bench.run(predict, asked, given)["predictions"].path)
    probabilities = [[line.probabilities[name] for name in ("no", "yes")] for line in lines]
    np.testing.assert_allclose(probabilities, scipy.special.softmax(scores, -1), atol=1e-5)


@pytest.mark.slow
@pytest.mark.covers("stages by themselves", family="bert", recipe="classification")
def test_a_small_bert_learns_a_class_of_two_texts_beyond_the_majority(
    shared_bench, dataset, trained
):
    whole, _ = trained
    metrics = ["accuracy", "f1", "f1_macro", "matthews"]

    positive = {"positive_class": "yes"}
    lines, scored = scores_of(shared_bench, dataset, whole, "classification", metrics, f1=positive)

    assert CheckpointArtifact(whole.path).record.model["settings"] == {"classes": ["no", "yes"]}
    assert {line.prediction for line in lines} == {"no", "yes"}
    assert "\n" in lines[0].source
    assert scored["metrics"]["accuracy"] > 90
    assert scored["confusion"]["classes"] == ["no", "yes"]
    assert np.sum(scored["confusion"]["counts"]) == len(lines)
    trivial = scored["baselines"]["most_frequent_target"]["metrics"]
    assert trivial["accuracy"] < 65
    assert trivial["matthews"] == 0


@pytest.mark.slow
@pytest.mark.covers("stages by themselves", family="gpt2", recipe="regression")
def test_a_small_gpt2_learns_a_number_better_than_the_mean(shared_bench):
    path = write_rows(shared_bench.root, pairs_of_words())
    config = {"recipe": "regression", "data": data_of(path, target_key="length")}
    dataset = shared_bench.run(preprocess, config)["dataset"]
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 64}
    model = {"family": "gpt2", "config": sizes}
    settings = TRAIN | {"recipe": "regression", "model": model, "eval": {"metrics": ["pearson"]}}
    settings |= {"batching": {"type": "bucketed", "num_buckets": 2}}
    checkpoint = shared_bench.run(train, settings, {"dataset": [dataset]})["checkpoint/last"]

    metrics = ["pearson", "spearman", "mse"]
    lines, scored = scores_of(shared_bench, dataset, checkpoint, "regression", metrics)

    mean = scored["baselines"]["mean_target"]["metrics"]
    assert {type(line.prediction) for line in lines} == {float}
    assert scored["metrics"]["pearson"] > 90
    assert scored["metrics"]["mse"] < mean["mse"] / 4
    assert mean["pearson"] == mean["spearman"] == 0


def test_a_label_that_is_no_number_is_told_with_file_and_row(bench):
    rows = [*pairs_of_words(3), {"question": "a", "answer": "b", "length": "long"}]
    path = write_rows(bench.root, rows)
    config = {"recipe": "regression", "data": data_of(path, target_key="length")}

    with pytest.raises(BadRows, match=rf"{path}:4: field 'length' is no number: it is 'long'"):
        bench.run(preprocess, config)


def test_a_field_that_the_head_of_a_file_lacks_is_told_by_a_plan(tmp_path):
    data = data_of(write_rows(tmp_path, pairs_of_words(5)), pair_key="answr", target_key="klass")
    config = preprocess.Config.from_json({"recipe": "classification", "data": data})

    said = str(list(preprocess.data_problems(config)))

    assert "no field 'answr'" in said
    assert "no field 'klass'" in said


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["recipe=text_to_text"], "pair_key' gives pairs of source texts"),
        (["preprocess.max_target_length=9"], "'max_target_length' would change nothing"),
        (["predict.num_beams=4"], "'num_beams' would change nothing"),
        (["train.batching.type=packed"], "cannot put several examples into one row"),
        (["model.family=t5"], "trains bert, roberta, gpt2"),
    ],
)
def test_what_makes_no_sense_is_told_before_anything_runs(tmp_path, overrides, said):
    path = tmp_path / "pairs.yaml"
    data = data_of(write_rows(tmp_path, pairs_of_words(5)))
    stages = {"preprocess": {}, "train": {}, "predict": {}, "evaluate": {"metrics": ["f1"]}}
    document = {"name": "pairs", "recipe": "classification", "data": data, "stages": stages}
    path.write_text(json.dumps(document))

    load_pipeline(path, [])
    with pytest.raises(ConfigError) as caught:
        load_pipeline(path, overrides)

    assert said in str(caught.value)
