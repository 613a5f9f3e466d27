"""Spearman's correlation of ranks of predicted and true numbers, -100 to 100; a constant gets 0."""

from __future__ import annotations

from collections.abc import Sequence

from redco_flow.metrics.correlation import correlation, number_pairs, ranks

KEYS = {"spearman": "max"}
READS = "numbers"


def compute(
    predictions: Sequence[float], references: Sequence[Sequence[float]]
) -> dict[str, float]:
    """Return the correlation of the ranks in percent."""
    return {"spearman": 100 * correlation(*map(ranks, number_pairs(predictions, references)))}
