"""Names of metrics: they depend on what the pipeline's stages are, not on which have reported."""

import pytest

from redco_flow.errors import UsageError
from redco_flow.tracking.run_metrics import locate_metrics, read_metrics, require_metric


def trained(kind="train", **metrics):
    return {"kind": kind, "artifacts": {"checkpoint/last": "c"}, "metrics": metrics}


def evaluated(kind="evaluate", **metrics):
    return {"kind": kind, "artifacts": {"metrics": "m"}, "metrics": metrics}


def left_out(kind):
    return {"kind": kind, "artifacts": {}, "metrics": None}


def without_kinds(stages):
    return {name: {k: v for k, v in one.items() if k != "kind"} for name, one in stages.items()}


TRAIN = trained(accuracy=24.44, eval_loss=1.5, loss=0.5)
OF_TRAIN = {"val/accuracy": 24.44, "val/eval_loss": 1.5, "train/loss": 0.5}


@pytest.mark.parametrize("as_recorded", [dict, without_kinds], ids=["now", "up to 0.2.0"])
def test_a_trainings_scores_have_the_same_names_with_and_without_an_evaluation(as_recorded):
    whole = {"train": TRAIN, "evaluate": evaluated(accuracy=26.92)}
    until_train = {"train": TRAIN, "evaluate": left_out("evaluate")}

    assert read_metrics(as_recorded(whole)) == {**OF_TRAIN, "accuracy": 26.92}
    assert read_metrics(as_recorded(until_train)) == OF_TRAIN


@pytest.mark.parametrize(
    ("stages", "names"),
    [
        (
            {"warm": trained(loss=1.0, bleu=2.0), "tune": left_out("train")},
            ["warm/train/loss", "warm/val/bleu"],
        ),
        (
            {"first": evaluated(bleu=1.0), "second": left_out("evaluate")},
            ["first/bleu"],
        ),
        (
            {"first": evaluated(bleu=1.0), "own": evaluated("own", bleu=2.0)},
            ["first/bleu", "own/bleu"],
        ),
        (
            {"score": evaluated(bleu=1.0), "tasks": evaluated("harness", **{"arc/acc": 0.5})},
            ["bleu", "arc/acc"],
        ),
        ({"curate": {"artifacts": {"curation": "c"}, "metrics": {"kept": 1.0}}}, ["curate/kept"]),
        # A stage called `val` has the names that begin so.
        (
            {"train": TRAIN, "val": left_out("evaluate"), "test": evaluated(accuracy=1.0)},
            ["test/accuracy", "train/val/accuracy", "train/val/eval_loss", "train/loss"],
        ),
    ],
)
def test_a_name_is_plain_where_only_one_stage_of_the_pipeline_can_have_it(stages, names):
    assert list(locate_metrics(stages)) == names


def test_a_request_for_another_splits_score_names_the_one_there_is():
    with pytest.raises(UsageError, match=r"no metric 'accuracy': only val/accuracy, measured by"):
        require_metric("accuracy", ["val/accuracy", "train/loss"], "run demo-1")
    with pytest.raises(UsageError, match="no metric 'bleu': only first/bleu, second/bleu"):
        require_metric("bleu", ["first/bleu", "second/bleu"], "run demo-1")
    require_metric("accuracy", ["val/accuracy", "accuracy"], "run demo-1")
