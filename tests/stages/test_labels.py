"""Classes: where their names come from, which labels are none, and that checkpoints have them."""

import json

import numpy as np
import pytest
from stage_kinds import evaluate, predict, preprocess, train

from redco_flow.runtime.context import Shard
from redco_flow.stages.artifacts.checkpoint import CheckpointArtifact
from redco_flow.stages.artifacts.dataset import DatasetArtifact
from redco_flow.stages.artifacts.predictions import read_predictions
from redco_flow.stages.data.hub_rows import class_names_of
from redco_flow.stages.data.row_values import BadValue
from redco_flow.stages.data.rows import BadRows
from redco_flow.stages.data.source import Source
from redco_flow.stages.predict.run import CannotPredict
from redco_flow.stages.preprocess import run as preprocess_run
from redco_flow.stages.preprocess.labels import ClassLabels, NumberLabels
from redco_flow.stages.train.scores import CannotTrain
from redco_flow.tracking.metrics_artifact import read_metrics

RECIPE = {"recipe": "python:named_blobs"}
TRAIN = RECIPE | {"num_epochs": 6, "global_batch_size": 8, "learning_rate": 0.1}
HELD_OUT = {"validation_fraction": 0.2, "test_fraction": 0.2}


def blobs(names, num_rows=90):
    source = np.random.default_rng(0)
    centres = {name: 3 * np.array([np.cos(i), np.sin(i)]) for i, name in enumerate(names)}
    for number in range(num_rows):
        name = names[number % len(names)]
        yield {"point": list(centres[name] + 0.3 * source.normal(size=2)), "blob": name}


def rows_file(folder, rows, name="rows.jsonl"):
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def dataset_of(bench, rows, settings=None, **data):
    section = {"train": rows_file(bench.root, rows), "validation_fraction": 0.0} | data
    config = RECIPE | {"settings": settings or {}, "data": section}
    return bench.run(preprocess, config)["dataset"]


def summary_of(dataset):
    return DatasetArtifact(dataset.path).summary


def source(split="train", **class_names):
    return Source(split, "rows", "rows.jsonl", lambda: iter(()), class_names)


def read_all(labels, values, split="train"):
    return [labels.read({"label": value}, "label", source(split)) for value in values]


def test_names_of_classes_are_those_of_the_training_data_sorted(bench):
    dataset = dataset_of(bench, blobs(["pear", "apple", "fig"]))

    assert summary_of(dataset).classes == ["apple", "fig", "pear"]


@pytest.mark.parametrize(
    ("values", "names"),
    [
        ([10, 9, -1], [-1, 9, 10]),
        (["10", "9", "b", "a"], ["9", "10", "a", "b"]),
        ([True, False], [0, 1]),
        ([1.0, np.float32(0)], [0, 1]),
    ],
)
def test_numbers_are_sorted_by_what_they_count(values, names):
    labels = ClassLabels()

    assert read_all(labels, values) == values
    assert labels.names == names


def test_a_recipe_predicts_names_that_stand_in_its_checkpoint(bench):
    dataset = dataset_of(bench, blobs(["pear", "apple", "fig"], 450), **HELD_OUT)
    trained = bench.run(train, TRAIN, {"dataset": [dataset]})["checkpoint/last"]
    inputs = {"dataset": [dataset], "checkpoint": [trained]}

    predictions = bench.run(predict, RECIPE, inputs)["predictions"]
    metrics = bench.run(evaluate, {"metrics": ["accuracy"]}, {"predictions": [predictions]})
    lines, _ = read_predictions(predictions.path)
    scores = json.loads((metrics["metrics"].path / "metrics.json").read_text())

    settings = CheckpointArtifact(trained.path).record.model["settings"]
    assert settings == {"classes": ["apple", "fig", "pear"]}
    assert {line.prediction for line in lines} == {"apple", "fig", "pear"}
    assert scores["metrics"]["accuracy"] > 90
    assert scores["baselines"]["most_frequent_target"]["metrics"]["accuracy"] < 60


def test_predictions_of_validation_rows_are_warned_of_unless_the_pipeline_names_them(bench, caplog):
    dataset = dataset_of(bench, blobs(["ham", "spam"]), validation_fraction=0.2)
    trained = bench.run(train, TRAIN, {"dataset": [dataset]})["checkpoint/last"]
    inputs = {"dataset": [dataset], "checkpoint": [trained]}

    bench.run(predict, RECIPE | {"split": "validation"}, inputs)
    assert "no test split" not in caplog.text
    bench.run(predict, RECIPE, inputs)

    assert "no test split" in caplog.text


def test_every_shard_finds_the_same_classes_as_one_process_does(bench):
    path = rows_file(bench.root, blobs([3, 1, 2], 300))
    config = preprocess.Config.from_json(RECIPE | {"data": {"train": path, **HELD_OUT}})
    whole = preprocess_run.run(bench.context("preprocess", work="whole"), config)

    shared = bench.context("preprocess", work="shared")
    preprocess_run.run_shard(shared, config, Shard(0, 2))
    joined = preprocess_run.run_shard(shared, config, Shard(1, 2))()

    found = [DatasetArtifact(one.outputs["dataset"].path).summary for one in (whole, joined)]
    assert found[0].classes == [1, 2, 3]
    assert found[0] == found[1]


def test_a_label_that_no_training_row_has_is_told_with_file_and_row(bench):
    later = rows_file(bench.root, blobs(["pear", "plum"], 4), "later.jsonl")

    with pytest.raises(BadRows, match=rf"{later}:2: field 'blob' is no class: 'plum' is none of"):
        dataset_of(bench, blobs(["pear", "apple"]), validation=later)


def test_labels_that_are_no_class_are_skipped_and_counted_where_the_pipeline_says_so(bench):
    rows = [*blobs(["b", "a"], 4), *({"point": [0, 0], "blob": bad} for bad in (None, 1.5, 1))]
    rows.append({"point": [0, 0]})

    summary = summary_of(dataset_of(bench, rows, on_bad_row="skip"))

    assert summary.classes == ["a", "b"]
    assert summary.skipped_rows == {"field 'blob' is no class": 3, "no field 'blob'": 1}


def test_names_in_the_settings_give_the_classes_their_order_and_are_all_that_there_are(bench):
    settings = {"classes": ["b", "a"]}

    assert summary_of(dataset_of(bench, blobs(["a", "b"]), settings)).classes == ["b", "a"]
    with pytest.raises(BadRows, match="'c' is none of 'b', 'a'"):
        dataset_of(bench, blobs(["a", "b", "c"]), settings)


def test_a_dataset_knows_whether_its_classes_have_an_order(bench):
    """Class number 1 is the positive one only where the pipeline or the data order the classes."""
    sorted_names = dataset_of(bench, blobs(["ham", "spam"]))
    given = dataset_of(bench, blobs(["ham", "spam"]), {"classes": ["spam", "ham"]})

    assert summary_of(sorted_names).class_names == (["ham", "spam"], False)
    assert summary_of(given).class_names == (["spam", "ham"], True)


def test_a_score_that_the_classes_do_not_define_ends_a_training_before_its_first_step(bench):
    dataset = dataset_of(bench, blobs(["ham", "spam"]), **HELD_OUT)

    with pytest.raises(CannotTrain, match=r"'f1': it is unknown which of the classes ham, spam"):
        bench.run(train, TRAIN | {"eval": {"metrics": ["f1"]}}, {"dataset": [dataset]})

    named = {"metrics": ["f1"], "metric_settings": {"f1": {"positive_class": "spam"}}}
    outputs = bench.run(train, TRAIN | {"eval": named}, {"dataset": [dataset]})
    assert outputs["checkpoint/last"]


def test_scores_of_other_names_than_a_metric_declares_are_kept_and_warned_of_once(bench, caplog):
    dataset = dataset_of(bench, blobs(["ham", "spam"]), **HELD_OUT)
    own = TRAIN | {"eval": {"metrics": ["own_metrics.uneven"]}, "keep": {"best": ["right"]}}

    trained = bench.run(train, own, {"dataset": [dataset]})["checkpoint/best/right"]
    told = [one.getMessage() for one in caplog.records if "own_metrics.uneven" in one.getMessage()]
    found = bench.run(predict, RECIPE, {"dataset": [dataset], "checkpoint": [trained]})
    inputs = {"predictions": [found["predictions"]]}
    evaluation = bench.run(evaluate, {"metrics": ["own_metrics.uneven"]}, inputs)["metrics"]

    summary, _ = read_metrics(evaluation.path)
    assert summary.metrics == {"right": 1.0, "tpyo": 0.5, "varied": 1.0}
    assert summary.baselines["most_frequent_target"]["metrics"].keys() == {"right", "tpyo"}
    assert summary.warnings == told
    assert ["'tpyo', not in" in told[0], "no 'typo', named" in told[1]] == [True, True]


def test_a_class_in_the_settings_that_no_training_row_has_is_logged(bench, caplog):
    dataset_of(bench, blobs(["a", "b"], 4), settings={"classes": ["b", "maybe", "a"]})

    told = [one.getMessage() for one in caplog.records if "no training row" in one.getMessage()]
    assert told == ["no training row has the class maybe: is the name in settings.classes right?"]


def test_training_with_other_classes_than_the_datasets_does_not_start(bench):
    dataset = dataset_of(bench, blobs(["a", "b"]))

    with pytest.raises(CannotTrain, match=r"settings\.classes is b, a, and the dataset"):
        bench.run(train, TRAIN | {"settings": {"classes": ["b", "a"]}}, {"dataset": [dataset]})


def test_classes_that_a_checkpoint_does_not_know_are_told_before_anything_is_predicted(bench):
    known, other = (dataset_of(bench, blobs(names)) for names in (["a", "b"], ["a", "z"]))
    trained = bench.run(train, TRAIN | {"num_epochs": 1}, {"dataset": [known]})["checkpoint/last"]

    with pytest.raises(CannotPredict, match="was not trained for: z; it knows a, b"):
        bench.run(
            predict,
            RECIPE | {"split": "train"},
            {"dataset": [other], "checkpoint": [trained]},
        )


def test_numbers_of_named_classes_become_the_names_in_the_datas_own_order():
    labels = ClassLabels()
    named = source("train", label=["neg", "pos", "neutral"])

    assert labels.read({"label": 1}, "label", named) == "pos"
    assert labels.names == ["neg", "pos", "neutral"]
    with pytest.raises(BadValue, match="-1 is no number of its 3 classes"):
        labels.read({"label": -1}, "label", named)


def test_a_hub_datasets_class_labels_are_found():
    from datasets import ClassLabel, Features, Value

    features = Features(text=Value("string"), label=ClassLabel(names=["neg", "pos"]))

    assert class_names_of(features) == {"label": ["neg", "pos"]}


def test_images_are_of_the_classes_that_their_folders_name(bench):
    from PIL import Image

    for name in ("wolf", "bear"):
        path = bench.root / "images" / name / "0.png"
        path.parent.mkdir(parents=True)
        Image.fromarray(np.zeros((1, 2), np.uint8)).save(path)
    data = {"dataset": str(bench.root / "images"), "validation_fraction": 0.0}
    data["columns"] = {"point": "image", "blob": "label"}

    dataset = bench.run(preprocess, RECIPE | {"data": data | {"on_bad_row": "skip"}})["dataset"]

    assert summary_of(dataset).classes == ["bear", "wolf"]
    assert [row["blob"] for row in DatasetArtifact(dataset.path).split("train")] == ["bear", "wolf"]


def test_a_column_with_a_number_that_is_not_whole_is_refused_whatever_is_skipped(bench):
    rows = [{"point": [0.0, 0.0], "blob": value} for value in (1.0, 1.5, 2.0)]

    with pytest.raises(ValueError, match=r"field 'blob' holds 1\.5, .*recipe regression"):
        dataset_of(bench, rows, on_bad_row="skip")


def test_booleans_and_numbers_are_no_classes_of_one_column():
    with pytest.raises(BadValue, match="true is a boolean, and 0 is a number"):
        read_all(ClassLabels(), [0, 2, True])
    with pytest.raises(BadValue, match=r"true is none of 'no', 'yes'; in settings\.classes false"):
        read_all(ClassLabels(["no", "yes"]), [True])


def test_a_column_with_a_value_for_each_row_is_not_taken_for_classes():
    with pytest.raises(ValueError, match="more than 10,000 different values"):
        read_all(ClassLabels(), range(10_001))


@pytest.mark.parametrize("value", [None, True, "", "a", float("nan"), [1]])
def test_what_is_no_finite_number_is_no_label_of_a_regression(value):
    with pytest.raises(BadValue, match="field 'label' is no number"):
        read_all(NumberLabels(), [value])


def test_numbers_are_read_from_texts_too():
    assert read_all(NumberLabels(), ["1.5", 2, np.float32(0.5)]) == [1.5, 2.0, 0.5]
