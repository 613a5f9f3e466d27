"""Datasets mixed by weight, and scores of each part of the data."""

import json
import math
from collections import Counter, defaultdict

import numpy as np
import pytest
from stage_kinds import evaluate, predict, preprocess, train

from redco_flow.recipes.find import find_recipe
from redco_flow.spec.load import settings_of
from redco_flow.stages.artifacts.dataset import DatasetArtifact
from redco_flow.stages.artifacts.predictions import read_predictions
from redco_flow.stages.data.rows import BadRows
from redco_flow.stages.train.data import read_training_data
from redco_flow.tracking.metrics_artifact import read_metrics

RECIPE = {"recipe": "language_modeling"}
WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight"]
TEXTS = {
    "words": [f"{a} {b}" for a in WORDS for b in WORDS],
    "numbers": [f"{i}{i}" for i in range(30)],
}
TINY = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32}
SETTINGS = RECIPE | {
    "model": {"config": TINY},
    "max_steps": 6,
    "global_batch_size": 8,
    "learning_rate": 0.01,
    "batching": {"type": "packed", "packed_length": 32},
}
BATCHINGS = {
    "padded": {"type": "padded"},
    "packed": {"type": "packed", "packed_length": 32},
    "windows": {"type": "windows", "window_length": 8},
    "random windows": {"type": "windows", "window_length": 8, "random_offsets": True},
}


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(scope="module")
def files(shared_bench):
    return {
        name: write(shared_bench.root / f"{name}.jsonl", [{"text": text} for text in texts])
        for name, texts in TEXTS.items()
    }


def data_of(files, **more):
    weights = {"words": 1.0, "numbers": 3.0}
    return {
        "mixture": {name: {"dataset": files[name], "weight": weights[name]} for name in files},
        "text_key": "text",
        "validation_fraction": 0.2,
        "tokenizer": {"train": {"type": "character"}},
        **more,
    }


@pytest.fixture(scope="module")
def dataset(shared_bench, files):
    settings = RECIPE | {"data": data_of(files), "max_target_length": 16}
    return shared_bench.run(preprocess, settings)["dataset"]


def arranged(dataset, **settings):
    """The training's data, and the text that each row of its batches begins with."""
    artifact = DatasetArtifact(dataset.path)
    config = train.Config.from_json({**SETTINGS, **settings})
    recipe = find_recipe("language_modeling").make({"config": TINY}, artifact.texts(8, 16))
    return read_training_data(artifact, recipe, config, None)


def parts_of(row, dataset):
    """Which parts a row of a batch holds: words have letters, numbers have digits."""
    examples = row if isinstance(row, list) else [row]
    ids = [one for example in examples for one in example["target_ids"].tolist()]
    (text,) = DatasetArtifact(dataset.path).tokenizer.decode_batch([ids])
    found = {"words": any(one.isalpha() for one in text), "numbers": any(map(str.isdigit, text))}
    return {name for name, is_in in found.items() if is_in}


def test_a_dataset_of_a_mixture_says_of_each_row_which_part_it_is_of(dataset):
    artifact = DatasetArtifact(dataset.path)

    assert artifact.summary.parts == {"words": 1.0, "numbers": 3.0}
    rows = [row for split in ("train", "validation") for row in artifact.split(split)]
    assert Counter(row["part"] for row in rows) == {"words": 64, "numbers": 30}
    for row in rows:
        assert row["row_id"].startswith(f"{row['part']}/{row['part']}.jsonl:")
        assert row["references"][0] in TEXTS[row["part"]]


def test_a_dataset_without_parts_is_what_it_was(bench, files):
    data = {"train": files["words"], "text_key": "text"}
    data |= {"tokenizer": {"train": {"type": "character"}}}
    artifact = DatasetArtifact(bench.run(preprocess, RECIPE | {"data": data})["dataset"].path)

    assert "parts" not in json.loads((artifact.path / "dataset.json").read_text())
    columns = {"row_id", "source", "references", "source_ids", "target_ids"}
    assert set(artifact.split("train")[0]) == columns
    plain = settings_of(preprocess.Config.from_json(RECIPE | {"data": data}))["data"]
    assert not {"mixture", "part_key"} & set(plain)


@pytest.mark.parametrize("batching", BATCHINGS.values(), ids=BATCHINGS)
@pytest.mark.parametrize(("weights", "share"), [({}, 3 / 4), ({"words": 7, "numbers": 1}, 1 / 8)])
def test_rows_of_batches_are_of_one_part_each_and_drawn_by_weight(
    dataset, batching, weights, share
):
    weights = {name: float(weight) for name, weight in weights.items()}
    data = arranged(dataset, batching=batching, mixture_weights=weights)

    drawn = data.order.rows(np.arange(4096), 0)
    parts = [parts_of(data.examples[index], dataset) for index in range(len(data.examples))]

    # A window of "22" and what ends it has nothing but digits; of the end tokens alone, nothing.
    assert all(len(one) <= 1 for one in parts)
    counts = Counter(name for row in drawn.tolist() for name in parts[row])
    assert counts["numbers"] / counts.total() == pytest.approx(share, abs=0.01)
    assert set(drawn.tolist()) == set(range(len(data.examples)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mixture_weights": {"words": 1.0}}, "names words, and the mixture is of words, numbers"),
        ({"batching": {"type": "bucketed"}}, "use batching.type padded or packed"),
    ],
)
def test_a_mixture_that_cannot_be_drawn_is_told(dataset, settings, message):
    with pytest.raises(ValueError, match=message):
        arranged(dataset, **settings)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"dataset": "words.jsonl"}, "names both a mixture and dataset"),
        ({"part_key": "language"}, "a mixture's parts are its datasets"),
        ({"mixture": {"web": {"dataset": "some/where"}}}, "takes no datasets of the hub"),
        ({"mixture": {"web": {"dataset": "gone.jsonl"}}}, "data.mixture.web': .* no file or dir"),
        ({"mixture": {"web": {"dataset": "a", "weight": 0.0}}}, "greater than 0"),
    ],
)
def test_a_mixture_that_cannot_be_read_is_told_beforehand(files, more, message):
    with pytest.raises(ValueError, match=message):
        preprocess.Config.from_json(RECIPE | {"data": data_of(files, **more)})


def test_the_first_examples_are_those_of_each_part(bench, files):
    data = data_of(files, max_examples=10, validation_fraction=0.0)

    dataset = bench.run(preprocess, RECIPE | {"data": data})["dataset"]

    rows = DatasetArtifact(dataset.path).split("train")
    assert Counter(row["part"] for row in rows) == {"words": 10, "numbers": 10}


@pytest.mark.slow
def test_each_part_has_a_perplexity_of_its_own(bench):
    rows = [{"text": text, "language": part} for part, texts in TEXTS.items() for text in texts]
    data = {
        "train": write(bench.root / "texts.jsonl", rows),
        "text_key": "text",
        "part_key": "language",
        "validation_fraction": 0.2,
        "tokenizer": {"train": {"type": "character"}},
    }
    dataset = bench.run(preprocess, RECIPE | {"data": data, "max_target_length": 16})["dataset"]
    checkpoint = bench.run(train, SETTINGS, {"dataset": [dataset]})["checkpoint/last"]
    inputs = {"dataset": [dataset], "checkpoint": [checkpoint]}
    settings = RECIPE | {"split": "validation", "prompt_length": 2}
    predictions = bench.run(predict, settings, inputs)["predictions"]
    inputs = {"predictions": [predictions]}
    asked = {"metrics": ["perplexity", "bits_per_byte", "exact_match"]}
    metrics = bench.run(evaluate, asked, inputs)["metrics"]

    summary, _ = read_metrics(metrics.path)
    losses, tokens, sizes = defaultdict(float), Counter(), Counter()
    for line in read_predictions(predictions.path)[0]:
        part = "numbers" if line.source[0].isdigit() else "words"
        assert line.part == part
        losses[part] += line.loss
        tokens[part] += line.num_tokens
        # Decoded apart, prompt and rest lose white space between them.
        letters = f"{line.source}{line.references[0]}".replace(" ", "")
        sizes[part] += len(next(t for t in TEXTS[part] if t.replace(" ", "") == letters))
    assert set(summary.parts) == {"words", "numbers"}
    for part, found in summary.parts.items():
        expected = math.exp(losses[part] / tokens[part])
        assert found["metrics"]["perplexity"] == pytest.approx(expected, rel=1e-9)
        expected = losses[part] / math.log(2) / sizes[part]
        assert found["metrics"]["bits_per_byte"] == pytest.approx(expected, rel=1e-9)
        assert "exact_match" in found["metrics"]
    assert sum(one["num_examples"] for one in summary.parts.values()) == summary.num_examples


def test_a_row_that_says_no_part_is_a_bad_row(bench):
    rows = [{"text": "one", "language": "en"}, {"text": "two"}]
    data = {
        "train": write(bench.root / "texts.jsonl", rows),
        "text_key": "text",
        "part_key": "language",
        "tokenizer": {"train": {"type": "character"}},
    }
    with pytest.raises(BadRows, match=r"texts.jsonl:2: no field 'language'"):
        bench.run(preprocess, RECIPE | {"data": data})
