"""Preference accuracy: shares of rows by hand, equal rewards, predictions without rewards."""

import pytest

from redco_flow.metrics.preference_accuracy import baselines, compute, per_example
from redco_flow.spec.metric import MetricWithBaselines, find_metric

ROWS = [
    {"chosen": "long enough", "rejected": "no"},
    {"chosen": "no", "rejected": "long enough"},
    {"chosen": "one", "rejected": "two"},
    {"chosen": "a longer answer", "rejected": "short"},
]


def rewarded(*pairs):
    return [{"chosen_reward": one, "rejected_reward": other} for one, other in pairs]


def test_equal_rewards_count_half():
    predictions = rewarded((0.3, -0.1), (-2.0, -1.0), (0.0, 0.0), (1.0, 0.5))

    assert per_example(predictions, ROWS) == {"preference_accuracy": [100.0, 0.0, 50.0, 100.0]}
    assert compute(predictions, ROWS) == {"preference_accuracy": 62.5}


def test_it_stands_beside_a_guess_and_the_longer_answer():
    found = baselines(ROWS)

    assert isinstance(find_metric("preference_accuracy"), MetricWithBaselines)
    assert compute(found["chance"], ROWS) == {"preference_accuracy": 50.0}
    assert per_example(found["longer_answer"], ROWS)["preference_accuracy"] == [100, 0, 50, 100]


@pytest.mark.parametrize("prediction", ["a text", {"chosen_log_likelihood": -1.0}])
def test_predictions_without_rewards_are_told_what_to_give(prediction):
    with pytest.raises(ValueError, match="and with `reference_scores` where the loss"):
        compute([prediction], ROWS[:1])
