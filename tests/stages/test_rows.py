"""A recipe of three functions on rows as they are: from the data to a score beside its baseline."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from stage_kinds import evaluate, predict, preprocess, train

from redco_flow.engine.deployer import Deployer
from redco_flow.errors import ConfigError
from redco_flow.runtime.context import Stopped
from redco_flow.spec.load import load_pipeline
from redco_flow.spec.pipeline import DataSection
from redco_flow.spec.schema import json_schema
from redco_flow.stages.artifacts.checkpoint import CheckpointArtifact
from redco_flow.stages.artifacts.dataset import DatasetArtifact
from redco_flow.stages.artifacts.predictions import read_predictions
from redco_flow.stages.data.hub_rows import hub_rows
from redco_flow.stages.data.row_values import BadValue, pack_row, unpack_row
from redco_flow.stages.data.rows import BadRows
from redco_flow.stages.data.source import data_files, open_sources
from redco_flow.stages.evaluate.run import CannotEvaluate
from redco_flow.stages.script import config as script_config

FLOWERS = Path(__file__).parents[2] / "docs" / "examples" / "flowers"
KINDS = {"preprocess": preprocess, "train": train, "predict": predict, "evaluate": evaluate}
RECIPE = {"recipe": "python:blobs", "settings": {"num_units": 16}}
DATA = {"dataset": "python:blobs", "validation_fraction": 0.2, "test_fraction": 0.2}
TRAIN = RECIPE | {
    "num_epochs": 8,
    "global_batch_size": 8,
    "learning_rate": 0.05,
    "eval": {"metrics": ["accuracy"]},
    "keep": {"best": ["accuracy"]},
}


@pytest.fixture(scope="module")
def dataset(shared_bench):
    return shared_bench.run(preprocess, RECIPE | {"data": DATA})["dataset"]


@pytest.fixture(scope="module")
def checkpoints(shared_bench, dataset):
    return shared_bench.run(train, TRAIN, {"dataset": [dataset]})


@pytest.fixture(scope="module")
def predictions(shared_bench, dataset, checkpoints):
    inputs = {"dataset": [dataset], "checkpoint": [checkpoints["checkpoint/best/accuracy"]]}
    return shared_bench.run(predict, {"recipe": "python:blobs"}, inputs)["predictions"]


def params_of(checkpoint):
    artifact = CheckpointArtifact(checkpoint.path)
    return artifact.load_params(artifact.build_recipe(), Deployer(devices=jax.devices()[:1]))


def test_rows_are_split_and_kept_as_they_are(dataset):
    artifact = DatasetArtifact(dataset.path)
    splits = {name: artifact.split(name) for name in artifact.summary.splits}
    first = splits["train"][0]

    assert sum(map(len, splits.values())) == 120
    assert all(10 < len(splits[name]) < 40 for name in ("validation", "test"))
    assert set(first) == {"row_id", "image", "label"}
    assert first["image"].dtype == np.float32
    assert first["image"].shape == (2, 2)


def test_a_recipe_of_three_functions_learns_and_is_scored_beside_the_majority_class(
    shared_bench, predictions
):
    found = shared_bench.run(evaluate, {"metrics": ["accuracy"]}, {"predictions": [predictions]})
    summary = json.loads((found["metrics"].path / "metrics.json").read_text())
    lines, _ = read_predictions(predictions.path)

    assert summary["metrics"]["accuracy"] > 80
    assert summary["baselines"]["most_frequent_target"]["metrics"]["accuracy"] < 60
    assert {type(line.prediction) for line in lines} == {int}
    assert lines[0].references == [lines[0].row["label"]]


def test_a_metric_says_what_it_reads(shared_bench, predictions):
    inputs = {"predictions": [predictions]}

    found = shared_bench.run(evaluate, {"metrics": ["python:own_metrics.named_rows"]}, inputs)
    summary = json.loads((found["metrics"].path / "metrics.json").read_text())

    assert summary["metrics"] == {"named": 0.0}  # the recipe reads no column of this name
    with pytest.raises(CannotEvaluate, match="'rouge' reads texts, and prediction 0 is a int"):
        shared_bench.run(evaluate, {"metrics": ["rouge"]}, inputs)


@pytest.mark.slow
def test_two_model_shards_and_a_stop_in_the_middle_change_nothing(
    shared_bench, dataset, checkpoints, stop_at_look
):
    inputs = {"dataset": [dataset]}
    settings = TRAIN | {"num_model_shards": 2}
    context = shared_bench.context("train", inputs, work="stopped")
    config = train.Config.from_json(settings)
    context.stop = stop_at_look(20)

    with pytest.raises(Stopped):
        train.run(context, config)
    again = shared_bench.run(train, settings, inputs, work="stopped")
    started = [record for record in shared_bench.records() if "start_step" in record]

    assert started[0]["start_step"] > 0
    whole, halves = (params_of(one["checkpoint/last"]) for one in (checkpoints, again))
    # Sums over two shards are added in another order.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-4), whole, halves)


def rows_file(folder, rows, name="rows.jsonl"):
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


GOOD = {"picture": [[0, 1], [1, 0]], "label": 1}
BAD = [{"label": 1}, {**GOOD, "label": 7}, {**GOOD, "picture": [1]}]


def test_bad_rows_are_told_with_file_and_row_before_anything_is_trained(bench):
    path = rows_file(bench.root, [GOOD, *BAD])
    data = {"train": path, "columns": {"image": "picture"}, "validation_fraction": 0.0}

    with pytest.raises(BadRows) as caught:
        bench.run(preprocess, RECIPE | {"data": data})

    message = str(caught.value)
    assert f"{path}:2: no field 'picture': its fields are label" in message
    assert f"{path}:3: collate_fn raised ValueError" in message
    assert "there are 3 classes" in message
    assert f"{path}:4: collate_fn raised ValueError" in message


def test_bad_rows_are_skipped_and_counted_where_the_pipeline_says_so(bench):
    path = rows_file(bench.root, [GOOD, *BAD])
    data = {"train": path, "columns": {"image": "picture"}, "validation_fraction": 0.0}

    made = bench.run(preprocess, RECIPE | {"data": data | {"on_bad_row": "skip"}})
    summary = DatasetArtifact(made["dataset"].path).summary

    assert summary.splits == {"train": {"rows": 1}}
    assert summary.skipped_rows == {"collate_fn raised ValueError": 2, "no field 'picture'": 1}


def test_equal_rows_are_held_out_together(bench):
    rows = [{"image": [0, 0, 0, number % 20], "label": 1} for number in range(200)]
    data = {"train": rows_file(bench.root, rows), "validation_fraction": 0.4}

    made = bench.run(preprocess, RECIPE | {"data": data})
    artifact = DatasetArtifact(made["dataset"].path)
    numbers = {
        name: {row["image"][3] for row in artifact.split(name)} for name in artifact.summary.splits
    }

    assert set(numbers) == {"train", "validation"}
    assert not numbers["train"] & numbers["validation"]


def write_images(folder):
    from PIL import Image

    source = np.random.default_rng(0)
    for number in range(12):
        path = folder / ("train", "test")[number % 4 == 3] / "abc"[number % 3] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(source.integers(0, 256, (2, 2), np.uint8)).save(path)


def test_a_directory_of_images_is_read_with_a_label_for_each_folder(bench):
    write_images(bench.root / "images")
    data = {"dataset": str(bench.root / "images"), "validation_fraction": 0.0}

    made = bench.run(preprocess, RECIPE | {"data": data})
    artifact = DatasetArtifact(made["dataset"].path)
    row = artifact.split("train")[0]

    assert {name: counts["rows"] for name, counts in artifact.summary.splits.items()} == {
        "train": 9,
        "test": 3,
    }
    assert (row["row_id"], row["label"]) == ("train/a/0.png:1", 0)
    expected = np.random.default_rng(0).integers(0, 256, (2, 2), np.uint8)
    np.testing.assert_array_equal(np.asarray(row["image"]), expected)


def test_a_linked_folder_is_digested_for_a_script_and_refused_in_a_directory_of_data(tmp_path):
    for name in ("data/a.jsonl", "elsewhere/b.jsonl"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("{}")
    data = tmp_path / "data"
    (data / "loop").symlink_to(data)
    (data / "self").symlink_to("self")
    (tmp_path / "elsewhere" / "back").symlink_to(data)
    (tmp_path / "elsewhere" / "again").symlink_to(tmp_path / "elsewhere")
    section = DataSection(dataset=str(data))
    script = script_config.Config(path="x.py", inputs={"data": str(data)})

    before = (data_files(section), script_config.data_files(script))
    (data / "link").symlink_to(tmp_path / "elsewhere")

    assert before == ([data / "a.jsonl"], [data / "a.jsonl"])
    assert script_config.data_files(script) == [data / "a.jsonl", data / "link/b.jsonl"]
    with pytest.raises(ValueError, match=r"link is a link to a folder outside of"):
        data_files(section)

    (data / "link").rename(data / ".link")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "scan.png").touch()
    (data / "notes").symlink_to(tmp_path / "notes")  # images are no data next to a data file
    assert data_files(section) == [data / "a.jsonl"]


def test_folders_of_a_split_that_is_left_out_are_no_classes(tmp_path):
    for path in ("train/b", "train/c", "test/a"):
        (tmp_path / path).mkdir(parents=True)
        (tmp_path / path / "0.png").write_bytes(b"")

    def classes(**splits):
        data = DataSection.from_json({"dataset": str(tmp_path), "splits": splits})
        return open_sources(data)[0].class_names["label"]

    assert classes() == ["a", "b", "c"]
    assert classes(test="none") == ["b", "c"]  # the fingerprint has no other files


def test_images_of_a_hub_dataset_are_kept_as_their_files(bench):
    from datasets import Dataset, Features, Image, Value

    write_images(bench.root)
    file = next(bench.root.rglob("*.png"))
    features = Features(image=Image(), label=Value("int64"))
    split = Dataset.from_dict({"image": [str(file)], "label": [1]}, features=features)

    (row,) = hub_rows(split)

    assert row.fields["label"] == 1
    assert unpack_row(pack_row(row.fields, [bench.root]))["image"].size == (2, 2)


def test_an_image_that_cannot_be_read_is_told_with_its_file(bench):
    write_images(bench.root / "images")
    broken = bench.root / "images" / "train" / "a" / "broken.png"
    broken.write_bytes((bench.root / "images" / "train" / "a" / "0.png").read_bytes()[:40])
    data = {"dataset": str(bench.root / "images"), "validation_fraction": 0.0}

    with pytest.raises(BadRows, match=rf"{broken}:1: field 'image' is no image that can be read"):
        bench.run(preprocess, RECIPE | {"data": data})


@pytest.mark.slow
def test_the_recipe_of_the_documentation_learns_from_a_table(bench, monkeypatch):
    monkeypatch.chdir(FLOWERS)
    monkeypatch.syspath_prepend(str(FLOWERS))
    stages = load_pipeline("flowers.yaml").stages
    artifacts = {}

    for name, kind in KINDS.items():
        inputs = {
            slot: [artifacts[ref.stage][ref.output] for ref in refs]
            for slot, refs in stages[name].inputs.items()
        }
        artifacts[name] = bench.run(kind, stages[name].config.model_dump(mode="json"), inputs)
    metrics = artifacts["evaluate"]["metrics"].path / "metrics.json"

    lines, _ = read_predictions(artifacts["predict"]["predictions"].path)
    assert {line.prediction for line in lines} == {"daisy", "tulip"}
    assert json.loads(metrics.read_text())["metrics"]["accuracy"] > 95


def test_a_packed_row_is_what_was_packed():
    row = {
        "text": "a",
        "nested": {"turns": [{"role": "user", "content": None}]},
        "array": np.arange(6, dtype=np.int16).reshape(2, 3),
        "number": np.float32(0.5),
        "bytes": b"\0\1",
    }

    found = unpack_row(pack_row(row))

    np.testing.assert_array_equal(found.pop("array"), row["array"], strict=True)
    assert found == {key: value for key, value in row.items() if key != "array"}
    with pytest.raises(BadValue, match=r"field 'x' cannot be stored: it is a builtins\.object"):
        pack_row({"x": object()})


PIPELINE = """
name: blobs
recipe: python:blobs
settings: {num_units: 8}
data: {dataset: "python:blobs"}
stages: {preprocess: , train: , predict: , evaluate: {metrics: [accuracy]}}
"""


@pytest.fixture
def load(tmp_path):
    def load_text(text, *overrides):
        path = tmp_path / "blobs.yaml"
        path.write_text(text)
        return load_pipeline(path, overrides)

    return load_text


def test_settings_of_a_recipe_are_typed_keys_in_the_fingerprint(load):
    default, given = load(PIPELINE.replace("8", "9")), load(PIPELINE, "settings.num_units=9")

    assert default.stages["train"].settings["settings"] == {"num_units": 9}
    assert default.stages["train"].settings == given.stages["train"].settings
    assert "settings" not in default.stages["evaluate"].settings


def test_what_a_recipe_has_not_is_refused_with_its_line(load):
    text = PIPELINE.replace("num_units: 8", "num_unit: 8")
    text = text.replace('"python:blobs"}', '"python:blobs", columns: {imag: x}}')

    more = ["train.dropout_rate=0.1", "max_source_length=9", "model.family=t5"]
    with pytest.raises(ConfigError) as caught:
        load(text, "predict.num_beams=2", "train.batching.type=packed")
    with pytest.raises(ConfigError) as caught_more:
        load(PIPELINE, *more)

    said = f"{caught.value}\n{caught_more.value}"
    for expected in (
        "4:12: 'settings' has no key 'num_unit'; did you mean 'num_units'?",
        "recipe 'python:blobs' reads no column 'imag'; did you mean 'image'?",
        "takes rows as they are, whose widths are not known",
        "command line: 'stages.predict': recipe 'python:blobs' predicts by its own pred_fn: "
        "'num_beams' would change nothing",
        "command line: 'model': recipe 'python:blobs' brings its own model",
        "'max_source_length' would change nothing",
    ):
        assert expected in said


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("x = 1", "lacks init_params, collate_fn, loss_fn, pred_fn"),
        ("import blobs_helper_that_is_missing", "importing broken_recipe failed at "),
    ],
)
def test_a_recipe_that_cannot_be_used_is_told_before_anything_runs(
    load, tmp_path, monkeypatch, body, said
):
    (tmp_path / "broken_recipe.py").write_text(body)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(__import__("sys").modules, "broken_recipe", raising=False)

    with pytest.raises(ConfigError, match=said):
        load(PIPELINE.replace("recipe: python:blobs", "recipe: python:broken_recipe"))


def test_the_schema_of_a_pipeline_has_its_recipes_settings():
    schema = json_schema("python:blobs")

    settings = schema["$defs"]["Settings"]
    assert schema["properties"]["settings"] == {"$ref": "#/$defs/Settings"}
    assert set(settings["properties"]) == {"num_units"}
    assert settings["additionalProperties"] is False
