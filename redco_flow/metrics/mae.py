"""Mean absolute error of predicted numbers, in the targets' own unit."""

from __future__ import annotations

import math
from collections.abc import Sequence

from redco_flow.metrics.correlation import number_pairs

KEYS = {"mae": "min"}
READS = "numbers"


def compute(
    predictions: Sequence[float], references: Sequence[Sequence[float]]
) -> dict[str, float]:
    """Return the mean over the examples."""
    errors = per_example(predictions, references)["mae"]
    return {"mae": math.fsum(errors) / len(errors)}


def per_example(
    predictions: Sequence[float], references: Sequence[Sequence[float]]
) -> dict[str, list[float]]:
    """Return each example's absolute error."""
    pairs = zip(*number_pairs(predictions, references), strict=True)
    return {"mae": [abs(one - other) for one, other in pairs]}
