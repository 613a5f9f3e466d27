"""Metrics of several answers to a prompt, against enumeration and counting by hand."""

from itertools import combinations

import pytest

from redco_flow.metrics import majority_at_k, pass_at_k
from redco_flow.spec.metric import Verdict, find_metric, gives_score, key_at


def verdicts(*answers, right="4"):
    return [Verdict(answer == right, answer) for answer in answers]


@pytest.mark.parametrize("num_answers", [1, 4, 7])
def test_pass_at_k_is_the_share_of_all_choices_of_k_answers_with_a_right_one(num_answers):
    for num_right in range(num_answers + 1):
        answers = [Verdict(i < num_right, str(i)) for i in range(num_answers)]
        for k in range(1, num_answers + 1):
            choices = list(combinations(answers, k))
            expected = 100 * sum(any(v.is_right for v in one) for one in choices) / len(choices)

            assert pass_at_k.of_answers([answers], k) == pytest.approx([expected], abs=1e-12)


def test_pass_at_k_of_many_answers_is_exact():
    # 1 - (190! / 180!) / (200! / 190!), by a product of ratios as in the paper's own program.
    product = 1.0
    for n in range(191, 201):
        product *= 1.0 - 10 / n

    found = pass_at_k.pass_at_k(200, 10, 10)

    assert found == pytest.approx(1 - product, rel=1e-12)


def test_the_commonest_of_the_first_k_answers_counts():
    rows = [
        verdicts("4", "5", "4"),
        verdicts("5", "4", "5", "4", "4"),  # of the first three, 5
        verdicts("4", "5"),  # as common as each other: the first one
        verdicts("5", "4"),
        verdicts(None, None, "4"),  # what is no answer has no vote
        verdicts(None),
    ]

    found = [majority_at_k.of_answers([row], min(3, len(row))) for row in rows]

    assert found == [[100.0], [0.0], [100.0], [0.0], [100.0], [0.0]]


def test_scores_are_named_by_k():
    assert key_at("pass@k", 10) == "pass@10"
    assert gives_score(pass_at_k, "pass@10")
    assert not gives_score(pass_at_k, "majority@10")
    assert not gives_score(pass_at_k, "pass@ten")


def test_a_training_is_told_that_such_a_metric_needs_a_judge():
    with pytest.raises(ValueError, match=r"'pass_at_k' is of several answers.*'judge'"):
        find_metric("pass_at_k")
