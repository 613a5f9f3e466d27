"""Metrics of classes and of numbers against scikit-learn and scipy."""

import numpy as np
import pytest
from scipy import stats
from sklearn import metrics as sklearn_metrics

from redco_flow.metrics import f1, f1_macro, mae, matthews, mse, pearson, spearman
from redco_flow.metrics.confusion import as_table, classes_of, confusion

SOURCE = np.random.default_rng(0)
NAMES = np.array(["apple", "fig", "pear", "plum"])
TRUE = SOURCE.choice(NAMES, 60, p=[0.6, 0.2, 0.15, 0.05]).tolist()
# Mostly right, and never one of the classes.
FOUND = [one if SOURCE.random() < 0.6 else str(SOURCE.choice(NAMES[:3])) for one in TRUE]
NUMBERS = SOURCE.normal(size=40).round(1)  # some are equal
NEAR = (NUMBERS + SOURCE.normal(size=40)).round(1)


def as_references(values):
    return [[value] for value in values]


def percent(value):
    return pytest.approx(100 * value, abs=1e-9)


def test_macro_f1_equals_scikit_learn():
    expected = sklearn_metrics.f1_score(TRUE, FOUND, average="macro", zero_division=0)

    assert f1_macro.compute(FOUND, as_references(TRUE))["f1_macro"] == percent(expected)


def test_the_positive_class_of_digits_in_texts_is_the_larger_number():
    found, true = ["9", "10", "10", "9", "10"], ["10", "10", "9", "9", "10"]

    expected = sklearn_metrics.f1_score(true, found, pos_label="10")

    assert f1.compute(found, as_references(true))["f1"] == percent(expected)


def test_f1_of_more_than_two_classes_says_which_metric_to_take():
    with pytest.raises(ValueError, match=r"3 classes \(a, b, c\): use f1_macro"):
        f1.compute(["a", "b"], [["c"], ["a"]])


@pytest.mark.parametrize("num_classes", [2, 4])
def test_matthews_correlation_equals_scikit_learn(num_classes):
    known = NAMES[:num_classes].tolist()
    true, found = ([one if one in known else known[0] for one in of] for of in (TRUE, FOUND))

    expected = sklearn_metrics.matthews_corrcoef(true, found)

    assert matthews.compute(found, as_references(true))["matthews"] == percent(expected)


def test_always_the_same_class_has_no_matthews_correlation():
    assert matthews.compute(["apple"] * 60, as_references(TRUE)) == {"matthews": 0.0}


def test_a_confusion_counts_what_was_predicted_of_each_class():
    counts = confusion(FOUND, as_references(TRUE))
    names = classes_of(counts)

    found = [[counts.get((true, one), 0) for one in names] for true in names]

    assert names == NAMES.tolist()
    np.testing.assert_array_equal(found, sklearn_metrics.confusion_matrix(TRUE, FOUND))


def test_a_table_has_the_commonest_classes_and_one_row_for_the_others():
    counts = {("a", "a"): 5, ("a", "z"): 1, ("b", "b"): 4, ("c", "d"): 1, ("d", "b"): 2}

    assert as_table(counts, 2) == {
        "classes": ["a", "b", None],
        "counts": [[5, 0, 1], [0, 4, 0], [0, 2, 1]],
    }
    assert as_table({("a", "b"): 1}, 2) == {"classes": ["a", "b"], "counts": [[0, 1], [0, 0]]}


def test_of_several_references_the_predicted_one_counts():
    counts = confusion(["a", "c"], [["b", "a"], ["b", "a"]])

    assert counts == {("a", "a"): 1, ("b", "c"): 1}


def test_correlations_and_errors_equal_scipy_and_scikit_learn():
    references = as_references(NUMBERS.tolist())
    found = NEAR.tolist()

    assert pearson.compute(found, references)["pearson"] == percent(
        stats.pearsonr(NEAR, NUMBERS).statistic
    )
    assert spearman.compute(found, references)["spearman"] == percent(
        stats.spearmanr(NEAR, NUMBERS).statistic
    )
    expected = sklearn_metrics.mean_squared_error(NUMBERS, NEAR)
    assert mse.compute(found, references)["mse"] == pytest.approx(expected)
    expected = sklearn_metrics.mean_absolute_error(NUMBERS, NEAR)
    assert mae.compute(found, references)["mae"] == pytest.approx(expected)


@pytest.mark.parametrize("metric", [pearson, spearman])
def test_a_constant_correlates_with_nothing(metric):
    # A mean of three times 0.1 is not 0.1.
    predictions = [*np.full(3, 0.1, np.float32)]
    assert list(metric.compute(predictions, [[1.0], [2.0], [4.0]]).values()) == [0.0]


def test_what_is_no_number_is_told_with_its_place():
    with pytest.raises(ValueError, match="reference of example 1 is no number: 'a'"):
        pearson.compute([1.0, 2.0], [[1.0], ["a"]])
    with pytest.raises(ValueError, match="prediction of example 1 is no number: nan"):
        spearman.compute([1.0, np.nan], [[1.0], [2.0]])  # it has no rank
