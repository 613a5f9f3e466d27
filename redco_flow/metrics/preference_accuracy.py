"""Preference accuracy: how often a policy gives the chosen answer the larger implicit reward.

The share of rows, in percent; equal rewards count half. Predictions are those of the recipe
preference. Beside it what a guess gets, and what prefers the longer answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

KEYS = {"preference_accuracy": "max"}
READS = "rows"

Row = Mapping[str, Any]

_REWARDS = ("chosen_reward", "rejected_reward")


def compute(predictions: Sequence[Any], references: Sequence[Row]) -> dict[str, float]:
    """Return the percentage of rows whose chosen answer is rewarded more.

    Raises:
        ValueError: nothing to score, or predictions without rewards.
    """
    scores = per_example(predictions, references)["preference_accuracy"]
    return {"preference_accuracy": sum(scores) / len(scores)}


def per_example(predictions: Sequence[Any], references: Sequence[Row]) -> dict[str, list[float]]:
    """Return 100.0, 50.0 or 0.0 for each row.

    Raises:
        ValueError: as `compute`.
    """
    if not predictions or len(predictions) != len(references):
        raise ValueError(f"{len(predictions)} predictions for {len(references)} rows.")
    margins = [_margin(prediction) for prediction in predictions]
    return {"preference_accuracy": [50.0 * ((one > 0) + (one >= 0)) for one in margins]}


def baselines(references: Sequence[Row]) -> dict[str, list[Any]]:
    """Return what rewards all answers alike, and what rewards an answer's length."""
    lengths = [(len(str(row["chosen"])), len(str(row["rejected"]))) for row in references]
    rewards = {"chance": [(0, 0)] * len(references), "longer_answer": lengths}
    return {
        name: [dict(zip(_REWARDS, pair, strict=True)) for pair in pairs]
        for name, pairs in rewards.items()
    }


def _margin(prediction: Any) -> float:
    if isinstance(prediction, Mapping) and all(name in prediction for name in _REWARDS):
        return float(prediction[_REWARDS[0]]) - float(prediction[_REWARDS[1]])
    raise ValueError(
        f"a prediction has no {' and '.join(_REWARDS)}: predict with recipe preference, and with "
        "`reference_scores` where the loss compares with a reference."
    )
