"""Mean squared error of predicted numbers, in the targets' own unit, squared."""

from __future__ import annotations

import math
from collections.abc import Sequence

from redco_flow.metrics.correlation import number_pairs

KEYS = {"mse": "min"}
READS = "numbers"


def compute(
    predictions: Sequence[float], references: Sequence[Sequence[float]]
) -> dict[str, float]:
    """Return the mean over the examples."""
    errors = per_example(predictions, references)["mse"]
    return {"mse": math.fsum(errors) / len(errors)}


def per_example(
    predictions: Sequence[float], references: Sequence[Sequence[float]]
) -> dict[str, list[float]]:
    """Return each example's squared error."""
    pairs = zip(*number_pairs(predictions, references), strict=True)
    return {"mse": [(one - other) ** 2 for one, other in pairs]}
