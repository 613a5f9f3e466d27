"""evaluate and compare on predictions written by hand, against numbers from elsewhere."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from stage_kinds import compare, evaluate

from redco_flow.metrics import bleu, exact_match
from redco_flow.records import digest_json
from redco_flow.runtime.context import Output, StageOutputs
from redco_flow.stages.artifacts.predictions import (
    PredictionsSummary,
    Targets,
    read_predictions,
    write_predictions,
)
from redco_flow.stages.evaluate.run import CannotEvaluate
from redco_flow.tracking.metrics_artifact import Prediction, read_metrics
from redco_flow.tracking.paired_bootstrap import CannotCompare

SUMMARY = {
    "split": "test",
    "generation": {"num_beams": 1},
    "checkpoint": "c" * 64,
    "step": 7,
    "data": "d" * 64,
    "config": "e" * 64,
    "most_frequent_target": {"text": "the cat sat on the mat", "count": 3, "among": 9},
}
REFERENCES = [f"the {animal} sat on the mat" for animal in ["cat", "dog", "cow", "pig", "ape"]] * 8


def predictions(
    bench, texts, name="predictions", references=REFERENCES, others=("something else",), **more
):
    lines = [
        Prediction(f"test.csv:{i}", f"animal {i}", text, [reference, *others])
        for i, (text, reference) in enumerate(zip(texts, references, strict=True))
    ]
    folder = bench.root / name
    summary = PredictionsSummary(num_examples=len(lines), **{**SUMMARY, **more})
    write_predictions(folder, lines, summary)
    outputs = StageOutputs({"predictions": Output("predictions", folder)})
    return bench.publish(outputs)["predictions"]


def evaluated(
    bench, texts, name="predictions", metrics=("bleu", "exact_match"), metric_settings=None, **more
):
    inputs = {"predictions": [predictions(bench, texts, name, **more)]}
    config = {"metrics": list(metrics), "metric_settings": metric_settings or {}}
    return bench.run(evaluate, config, inputs)["metrics"]


def test_scores_are_those_of_the_metrics_over_all_references(bench):
    texts = [REFERENCES[0]] * 20 + ["something else"] * 20

    summary, lines = read_metrics(evaluated(bench, texts).path)

    references = [[text, "something else"] for text in REFERENCES]
    expected = bleu.compute(texts, references) | exact_match.compute(texts, references)
    assert summary.metrics == expected
    assert [line["row_id"] for line in lines] == [f"test.csv:{i}" for i in range(40)]
    assert np.mean([line["scores"]["exact_match"] for line in lines]) == 100 * 24 / 40


def test_settings_and_the_order_of_classes_are_used_and_recorded(bench, caplog):
    names = ["not_equivalent", "equivalent"]
    found = [names[1]] * 30 + [names[0]] * 10
    most_frequent = {"text": names[0], "count": 3, "among": 9}

    summary, _ = read_metrics(
        evaluated(
            bench,
            found,
            metrics=("f1", "bleu"),
            metric_settings={"bleu": {"tokenize": "char"}},
            references=[names[one] for one in [1] * 20 + [0] * 20],
            classes=names,
            classes_are_ordered=True,
            most_frequent_target=most_frequent,
        ).path
    )

    # Of 30 predicted `equivalent` 20 are right, and no true one is missing: F1 = 2 * 20 / 50.
    assert summary.metrics["f1"] == pytest.approx(80.0)
    assert summary.settings == {
        "f1": {"positive_class": "equivalent"},
        "bleu": {"tokenize": "char", "lowercase": False},
    }
    assert summary.confusion["classes"][:2] == names
    assert summary.warnings is None


def test_predictions_of_0_2_0_do_not_say_which_class_is_positive(bench):
    texts = ["ham", "spam"] * (len(REFERENCES) // 2)
    given = {"metrics": ("f1",), "references": texts, "others": ()}
    given["most_frequent_target"] = {"text": "ham", "count": 3, "among": 9}

    with pytest.raises(CannotEvaluate, match=r"f1: it is unknown which .* ham, spam .*Add `metric"):
        evaluated(bench, texts, **given)
    named = {"f1": {"positive_class": "spam"}}
    made = evaluated(bench, texts, "others", metric_settings=named, **given)

    assert read_metrics(made.path)[0].metrics == {"f1": 100.0}


def test_a_metric_that_does_not_suit_the_references_is_warned_of(bench, caplog):
    texts = ["今天天气很好"] * len(REFERENCES)
    most_frequent = {"text": texts[0], "count": 3, "among": 9}

    summary, _ = read_metrics(
        evaluated(
            bench,
            texts,
            metrics=("rouge",),
            references=texts,
            others=(),
            most_frequent_target=most_frequent,
        ).path
    )

    assert summary.metrics["rouge1"] == 0
    [warning] = summary.warnings
    assert "rouge: 100% of the references have no token of [a-z0-9]" in warning
    assert warning in caplog.text


def test_half_a_surrogate_pair_is_written_read_back_and_scored(bench):
    half = "a \\ \ud83d b"

    artifact = predictions(bench, [half] * len(REFERENCES))

    lines, _ = read_predictions(artifact.path)
    assert {line.prediction for line in lines} == {half}
    assert evaluated(bench, [half] * len(REFERENCES), "scored")


def test_every_score_stands_beside_what_trivial_models_get(bench):
    summary, _ = read_metrics(evaluated(bench, REFERENCES).path)

    frequent, copied = (summary.baselines[name] for name in ("most_frequent_target", "copy_source"))
    assert frequent["text"] == "the cat sat on the mat"
    assert frequent["metrics"]["exact_match"] == 100 / 5
    assert copied["metrics"]["exact_match"] == 0.0
    assert set(frequent["metrics"]) == set(copied["metrics"]) == set(summary.metrics)


def test_an_evaluation_names_its_checkpoint_data_and_config(bench):
    """Engine case 54: each record names its checkpoint, data and configuration."""
    summary, _ = read_metrics(evaluated(bench, REFERENCES).path)

    [record] = bench.records()

    assert record["metrics"] == summary.metrics
    for found in (record["checkpoint"], summary.checkpoint):
        assert found == "c" * 64
    assert record["data"] == summary.data == "d" * 64
    config = evaluate.Config.from_json({"metrics": ["bleu", "exact_match"]})
    assert record["config"] == summary.config == digest_json(config.model_dump(mode="json"))


def test_a_metric_that_returns_no_mapping_is_named():
    metric = SimpleNamespace(KEYS={"good": "max"}, compute=lambda *_: 1.0)

    with pytest.raises(
        ValueError, match=r"'python:own' returned 1\.0: its `compute` returns a map"
    ):
        Targets([["a"]], [{}]).score("python:own", metric, ["a"])


def test_the_report_of_scores_is_plain_json(bench):
    artifact = evaluated(bench, REFERENCES)

    record = json.loads((artifact.path / "metrics.json").read_text())

    assert record["metrics"]["exact_match"] == 100.0
    assert record["directions"] == {"bleu": "max", "exact_match": "max"}


def test_a_metric_without_scores_of_examples_is_scored_and_named_where_systems_are_compared(
    bench, caplog
):
    metrics = ("exact_match", "own_metrics.length")
    one = evaluated(bench, REFERENCES, "one", metrics)
    other = evaluated(bench, ["something else"] * len(REFERENCES), "other", metrics)

    found = bench.run(compare, {"num_resamples": 100}, {"metrics": [one, other]})["metrics"]

    assert read_metrics(one.path)[0].metrics["words"] == 6.0
    record = json.loads((found.path / "comparison.json").read_text())
    assert [pair["key"] for pair in record["pairs"]] == ["exact_match"]
    assert "its metric has no per_example" in record["not_compared"]["words"]
    assert "not compared: 'words'" in caplog.text


def test_systems_scored_only_by_metrics_without_scores_of_examples_cannot_be_compared(bench):
    one = evaluated(bench, REFERENCES, "one", ["own_metrics.length"])
    other = evaluated(bench, REFERENCES[::-1], "other", ["own_metrics.length"])

    with pytest.raises(CannotCompare, match=r"'words' .*no per_example.*nothing is left"):
        bench.run(compare, {}, {"metrics": [one, other]})


def test_an_unknown_metric_is_an_error_when_the_pipeline_is_read():
    with pytest.raises(ValueError, match="there is no metric 'rogue'"):
        evaluate.Config.from_json({"metrics": ["rogue"]})
    with pytest.raises(ValueError, match="names a metric twice"):
        evaluate.Config.from_json({"metrics": ["bleu", "bleu"]})


def compared(bench, first, second, **settings):
    inputs = {"metrics": [first, second]}
    artifact = bench.run(compare, {"num_resamples": 2000, **settings}, inputs)["metrics"]
    record = json.loads((artifact.path / "comparison.json").read_text())
    return {pair["key"]: pair for pair in record["pairs"]}, artifact


def half_wrong(share):
    wrong = round(share * len(REFERENCES))
    return ["a wrong text here now"] * wrong + REFERENCES[wrong:]


def test_a_clear_difference_is_significant_and_its_interval_is_the_binomials(bench):
    first = evaluated(bench, REFERENCES, "first")
    second = evaluated(bench, half_wrong(0.5), "second")

    pairs, _ = compared(bench, first, second)

    pair = pairs["exact_match"]
    assert pair["difference"] == 50.0
    assert pair["is_significant"]
    assert pair["p_value"] <= 0.001
    # The difference is the share of 40 draws that hit a wrong row: deviation sqrt(.25/40) = 7.9.
    assert pair["low"] == pytest.approx(50 - 1.96 * 7.9, abs=2.6)
    assert pair["high"] == pytest.approx(50 + 1.96 * 7.9, abs=2.6)
    assert pairs["bleu"]["is_significant"]


def test_equal_systems_do_not_differ(bench):
    first = evaluated(bench, half_wrong(0.5), "first")
    second = evaluated(bench, half_wrong(0.5), "second", metrics=["exact_match", "bleu"])

    pairs, _ = compared(bench, first, second)

    for pair in pairs.values():
        assert (pair["difference"], pair["low"], pair["high"]) == (0.0, 0.0, 0.0)
        assert pair["p_value"] == 1.0
        assert not pair["is_significant"]


def test_pooled_scores_are_pooled_anew_for_each_draw(bench):
    """The oracle draws the same rows and asks the metric for the set's score."""
    texts = [half_wrong(0.3), half_wrong(0.6)]
    pairs, _ = compared(
        bench, evaluated(bench, texts[0], "a"), evaluated(bench, texts[1], "b"), num_resamples=100
    )

    references = [[text, "something else"] for text in REFERENCES]
    times = np.random.default_rng(0).multinomial(40, np.full(40, 1 / 40), size=100)
    differences = []
    for row in times:
        drawn = np.repeat(np.arange(40), row)
        scores = [
            bleu.compute([t[i] for i in drawn], [references[i] for i in drawn])["bleu"]
            for t in texts
        ]
        differences.append(scores[0] - scores[1])
    low, high = np.quantile(differences, [0.025, 0.975])
    assert (pairs["bleu"]["low"], pairs["bleu"]["high"]) == pytest.approx((low, high))


def test_the_same_seed_gives_the_same_comparison(bench):
    first = evaluated(bench, half_wrong(0.3), "first")
    second = evaluated(bench, half_wrong(0.4), "second")

    ids = {compared(bench, first, second, seed=seed)[1].id for seed in (1, 1, 2)}

    assert len(ids) == 2


def test_evaluations_on_other_examples_cannot_be_compared(bench):
    first = evaluated(bench, REFERENCES, "first")
    second = evaluated(bench, REFERENCES[1:], "second", references=REFERENCES[1:])

    with pytest.raises(CannotCompare, match="not evaluated on the same examples"):
        compared(bench, first, second)


def test_one_evaluation_cannot_be_compared(bench):
    with pytest.raises(CannotCompare, match="at least two"):
        bench.run(compare, {}, {"metrics": [evaluated(bench, REFERENCES)]})
