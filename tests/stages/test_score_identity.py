"""Two scores are subtracted only if split, rows, metric, its code and its settings are equal."""

import dataclasses
import math

import pytest

from redco_flow.records import digest_json
from redco_flow.tracking.artifacts import ArtifactStore
from redco_flow.tracking.metrics_artifact import MetricsSummary
from redco_flow.tracking.paired_bootstrap import Evaluation, why_not_compared
from redco_flow.tracking.results import StageResult
from redco_flow.tracking.score_identity import ScoreIdentity, identify_scores, of_evaluation
from redco_flow.tracking.workspace import Workspace

CODE = {"redco_flow.metrics.bleu": "1" * 64}
SCORE = ScoreIdentity("test", "a" * 64, 12, "bleu", CODE, "s" * 64)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"split": "validation"}, "another split: 'validation', not 'test'"),
        ({"rows": "b" * 64}, "other rows of 'test'"),
        ({"rows": "b" * 64, "num_examples": 9}, "other rows of 'test' (9, not 12)"),
        ({"metric": "own.bleu"}, "another metric: 'own.bleu', not 'bleu'"),
        (
            {"code": {"redco_flow.metrics.bleu": "2" * 64}},
            "other metric code: redco_flow.metrics.bleu",
        ),
        ({"settings": "t" * 64}, "other metric settings"),
        # What one of the two has no record of tells nothing.
        ({"split": "", "rows": "", "metric": "", "code": {}, "settings": ""}, None),
    ],
)
def test_each_part_of_an_identity_that_differs_is_a_reason(change, reason):
    assert SCORE.comparable_with(dataclasses.replace(SCORE, **change)) == reason


@pytest.fixture
def store(tmp_path):
    return ArtifactStore(Workspace.open(tmp_path / "workspace"))


@pytest.fixture
def evaluation(store, tmp_path):
    """A metrics artifact of these metrics and settings, and the result that it is of."""

    def make(modules=("bleu", "exact_match"), settings=None, **code):
        source = tmp_path / "metrics.json"
        record = {"modules": list(modules), "settings": settings, "split": "test"}
        source.write_text(str([record, code]))
        artifact = store.publish("metrics", source, metadata=record)
        ingredients = {"code": {f"redco_flow.metrics.{name}": d for name, d in code.items()}}
        return artifact, StageResult("f" * 64, "demo", "evaluate", "evaluate", ingredients, {})

    return make


def why(first, second, key):
    return of_evaluation(*first, key).comparable_with(of_evaluation(*second, key))


def test_settings_and_code_of_one_metric_say_nothing_of_another_ones_scores(evaluation):
    first = evaluation(settings={"bleu": {"tokenize": "13a"}}, bleu="1", exact_match="1")
    second = evaluation(settings={"bleu": {"tokenize": "zh"}}, bleu="1", exact_match="1")
    third = evaluation(settings={"bleu": {"tokenize": "zh"}}, bleu="2", exact_match="1", metric="9")

    assert why(first, second, "bleu") == "other metric settings"
    assert why(second, third, "bleu") == "other metric code: redco_flow.metrics.bleu"
    assert why(first, third, "exact_match") is None


def trained(dataset_id, **settings):
    given = {"recipe": "text_to_text", "eval": {"num_examples": None, "metrics": ["bleu"]}}
    ingredients = {"settings": given | settings, "inputs": {"dataset": [dataset_id]}}
    return StageResult("f" * 64, "demo", "train", "train", ingredients, {})


def test_validation_scores_of_two_datasets_with_equal_validation_files_are_compared(
    store, tmp_path
):
    def dataset(train, validation):
        folder = tmp_path / f"{train}-{validation}"
        folder.mkdir()
        (folder / "train-00000.arrow").write_text(train)
        (folder / "validation-00000.arrow").write_text(validation)
        return store.publish("dataset", folder).id

    stages = {"train": {"artifacts": {"checkpoint/last": "c"}, "metrics": {"bleu": 1, "loss": 1}}}
    first, grown, other = (
        identify_scores(stages, {"train": trained(dataset(*files))}, store)
        for files in (("a", "b"), ("more", "b"), ("a", "other"))
    )

    assert first["val/bleu"].comparable_with(grown["val/bleu"]) is None
    assert "other rows of 'train'" in first["train/loss"].comparable_with(grown["train/loss"])
    assert "other rows" in first["val/bleu"].comparable_with(other["val/bleu"])


def test_rows_of_a_deleted_dataset_are_unknown_and_not_other_rows(store, tmp_path):
    folder = tmp_path / "dataset"
    folder.mkdir()
    (folder / "validation-00000.arrow").write_text("a")
    kept = store.publish("dataset", folder).id
    entry = {"artifacts": {"checkpoint/last": "c"}, "metrics": {"bleu": 1}}

    here, gone, again = (
        identify_scores({"train": entry}, {"train": trained(dataset)}, store)["val/bleu"]
        for dataset in (kept, "d" * 64, "d" * 64)
    )

    unknown = "rows of 'validation' are unknown: a dataset was deleted"
    assert here.comparable_with(gone) == gone.comparable_with(here) == unknown
    assert gone.comparable_with(again) is None


def test_losses_of_two_objectives_are_not_compared_but_scores_of_their_texts_are(store):
    entry = {"artifacts": {"checkpoint/last": "c"}, "metrics": {"eval_loss": 1.0, "bleu": 1.0}}
    first, second, flipped = (
        identify_scores({"train": entry}, {"train": trained("d" * 64, settings=settings)}, store)
        for settings in (
            {"loss": {"type": "dpo"}},
            {"loss": {"type": "orpo"}},
            {"loss": {"type": "dpo"}, "flip": True},
        )
    )

    loss, bleu = "val/eval_loss", "val/bleu"
    assert first[loss].comparable_with(second[loss]) == "other metric settings"
    assert first[loss].comparable_with(flipped[loss]) is None
    assert first[bleu].comparable_with(second[bleu]) is None
    assert (first[bleu].rows, first[bleu].dataset) == ("", "d" * 64)  # the dataset is gone
    assert first[bleu].settings == digest_json([None, None])


def scored(name, modules, key, mean, values):
    nothing = {"baselines": {}, "step": 1, "predictions": "", "checkpoint": "", "data": ""}
    summary = MetricsSummary(
        metrics={key: mean}, directions={key: "max"}, modules=modules, num_examples=len(values),
        split="test", config="", examples_digest="e", **nothing,
    )  # fmt: skip
    lines = [{"scores": {} if one is None else {key: one}} for one in values]
    return Evaluation(name, "a" * 64, summary, lines)


def test_scores_of_one_key_by_two_metrics_are_not_resampled_together():
    first, second = (scored(one, [one], "bleu", 1.0, [1.0]) for one in ("bleu", "own.bleu"))

    assert why_not_compared((first, first), "bleu") == ""
    assert why_not_compared((first, second), "bleu") == (
        "'bleu' of 'bleu' and 'own.bleu' cannot be compared: another metric: 'own.bleu', not 'bleu'"
    )


def test_scores_of_lm_eval_that_are_no_mean_of_their_rows_are_not_resampled():
    key, values = "lambada/perplexity", [-2.0, -1.0]
    old = scored("old", [], key, math.exp(1.5), values)
    first, second = (scored(f"by {one}", [], key, 0.5, one) for one in ([0.0, 1.0], [0.5, None]))

    assert "'old' is only defined for the full set" in why_not_compared((old, old), key)
    assert why_not_compared((first, first), key) == ""
    assert "have scores 'lambada/perplexity' for different rows" in why_not_compared(
        (first, second), key
    )
