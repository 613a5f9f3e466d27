"""Pearson's correlation of predicted and true numbers, -100 to 100; a constant gets 0."""

from __future__ import annotations

from collections.abc import Sequence

from redco_flow.metrics.correlation import correlation, number_pairs

KEYS = {"pearson": "max"}
READS = "numbers"


def compute(
    predictions: Sequence[float], references: Sequence[Sequence[float]]
) -> dict[str, float]:
    """Return the correlation in percent."""
    return {"pearson": 100 * correlation(*number_pairs(predictions, references))}
