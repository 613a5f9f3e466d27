"""Settings of metrics and the order of classes, against sacrebleu and scikit-learn."""

import re

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from sacrebleu.metrics.bleu import BLEU
from sklearn.metrics import f1_score

from redco_flow.metrics.confusion import ClassNames, as_table
from redco_flow.metrics.metric import ExampleMetric, PooledMetric
from redco_flow.metrics.settings import (
    check_metric_settings,
    configured_metric,
    described_settings,
    warnings_of,
)

CHINESE = ["今天天气很好，我们去公园散步吧。", "他在北京大学学习计算机科学。"]
NEAR_CHINESE = ["今天天气很好，我们去学校散步吧。", "她在北京大学学习数学。"]
GLUE = ClassNames(["not_equivalent", "equivalent"], are_ordered=True)


def as_references(values):
    return [[value] for value in values]


def test_f1_is_of_class_number_1_in_the_order_of_the_data():
    found = ["equivalent", "equivalent", "not_equivalent", "equivalent"]
    true = ["equivalent", "not_equivalent", "not_equivalent", "equivalent"]

    metric = configured_metric("f1", {}, GLUE)

    # GLUE: class 1 is `equivalent`: precision 2/3, recall 1.
    assert metric.compute(found, as_references(true))["f1"] == pytest.approx(80.0)
    assert described_settings(metric) == {"positive_class": "equivalent"}
    of_old_predictions = configured_metric("f1", {"f1": {"positive_class": 0}})
    assert described_settings(of_old_predictions) == {"positive_class": 0}


@settings(max_examples=40, deadline=None)
@given(
    pairs=st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=30),
    names=st.sampled_from([("no", "yes"), ("yes", "no"), (0, 1), ("0", "1"), ("b", "a")]),
    is_named=st.booleans(),
)
def test_f1_equals_scikit_learn_for_either_positive_class(pairs, names, is_named):
    true, found = ([names[one] for one in column] for column in zip(*pairs, strict=True))
    positive = names[0] if is_named else names[1]
    wanted = {"f1": {"positive_class": positive}} if is_named else {}

    metric = configured_metric("f1", wanted, ClassNames(names, are_ordered=True))

    expected = f1_score(true, found, pos_label=positive, zero_division=0)
    assert metric.compute(found, as_references(true))["f1"] == pytest.approx(100 * expected)


@pytest.mark.parametrize("names", [(0, 1), ("0", "1"), (-1, 1)])
def test_the_larger_of_two_numbers_is_positive_though_the_data_give_no_order(names):
    metric = configured_metric("f1", {}, ClassNames(names, are_ordered=False))

    assert metric.compute([names[0]], [[names[0]]])["f1"] == 0.0
    assert metric.compute([names[1]], [[names[1]]])["f1"] == 100.0


def test_words_without_an_order_need_a_positive_class_before_anything_is_scored():
    unordered = ClassNames(["acceptable", "unacceptable"], are_ordered=False)

    with pytest.raises(ValueError, match=r"unknown which .*\{f1: \{positive_class: …\}\}`"):
        configured_metric("f1", {}, unordered)
    with pytest.raises(ValueError, match="'fine' is not among the classes: acceptable, un"):
        configured_metric("f1", {"f1": {"positive_class": "fine"}}, unordered)
    with pytest.raises(ValueError, match=r"3 classes \(a, b, c\): use f1_macro"):
        configured_metric("f1", {}, ClassNames(["a", "b", "c"], are_ordered=True))


def test_a_table_of_classes_keeps_the_order_of_the_data():
    counts = {("not_equivalent", "equivalent"): 1, ("equivalent", "equivalent"): 2}

    assert as_table(counts, 12, GLUE) == {
        "classes": ["not_equivalent", "equivalent"],
        "counts": [[0, 1], [0, 2]],
    }


@pytest.mark.parametrize("options", [{"tokenize": "zh"}, {"tokenize": "char", "lowercase": True}])
def test_bleu_with_settings_equals_sacrebleu(options):
    predictions, texts = [*NEAR_CHINESE, "A Dog"], [*CHINESE, "a dog"]
    metric = configured_metric("bleu", {"bleu": options})
    assert isinstance(metric, PooledMetric)

    expected = BLEU(**options).corpus_score(predictions, [texts]).score
    each = BLEU(effective_order=True, **options).sentence_score(predictions[0], texts[:1]).score

    found = metric.compute(predictions, as_references(texts))["bleu"]
    assert found == pytest.approx(expected, abs=1e-9)
    assert found > 0
    assert metric.per_example(predictions, as_references(texts))["bleu"][0] == pytest.approx(each)


def test_rouge_with_a_tokenizer_scores_texts_without_spaces():
    metric = configured_metric("rouge", {"rouge": {"tokenize": "char"}})
    assert isinstance(metric, ExampleMetric)

    scores = metric.per_example(["今天很好"], [["今天好"]])

    # By hand: 3 of 4 and of 3 characters; one common bigram of 3 and of 2.
    assert scores["rouge1"] == [pytest.approx(100 * 2 * 3 / (4 + 3))]
    assert scores["rouge2"] == [pytest.approx(100 * 2 * 1 / (3 + 2))]
    assert scores["rougeL"] == [pytest.approx(100 * 2 * 3 / (4 + 3))]


@pytest.mark.parametrize(
    ("metric", "options", "texts", "warning"),
    [
        ("bleu", {}, CHINESE, "script without spaces"),
        ("bleu", {"tokenize": "zh"}, CHINESE, None),
        ("bleu", {}, ["Ein Satz.", "今天"], None),
        ("rouge", {}, CHINESE, r"no token of \[a-z0-9\]"),
        ("rouge", {}, ["Привет мир", "добрый день"], r"no token of \[a-z0-9\]"),
        ("rouge", {"tokenize": "intl"}, ["Привет мир", "добрый день"], None),
        ("rouge", {"tokenize": "13a"}, ["สวัสดีชาวโลก"], "script without spaces"),
        ("exact_match", {}, CHINESE, None),
    ],
)
def test_a_tokenizer_that_does_not_suit_the_script_is_warned_of(metric, options, texts, warning):
    found = warnings_of(
        configured_metric(metric, {metric: options} if options else {}), as_references(texts)
    )

    assert len(found) == (warning is not None)
    assert all(re.search(warning, one) for one in found)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"belu": {}}, "names 'belu', .* did you mean 'bleu'"),
        ({"accuracy": {"a": 1}}, "'accuracy', which is a metric without settings"),
        ({"bleu": {"tokeniser": "zh"}}, "no setting 'tokeniser'; did you mean 'tokenize'"),
        ({"bleu": {"tokenize": "chinese"}}, "'bleu.tokenize' must be '13a', .* not 'chinese'"),
        ({"bleu": {"lowercase": "yes"}}, "'bleu.lowercase' must be"),
    ],
)
def test_settings_that_no_metric_has_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        check_metric_settings(options, ["bleu", "accuracy"])


def test_a_tokenizer_whose_packages_or_files_are_missing_says_how_to_get_them(
    monkeypatch, tmp_path
):
    monkeypatch.setattr("sacrebleu.utils.SACREBLEU_DIR", str(tmp_path))

    with pytest.raises(ValueError, match=r"'flores200' needs .*: once, where there is a network"):
        configured_metric("bleu", {"bleu": {"tokenize": "flores200"}})
