"""Accuracy: the share of predicted classes equal to one of their references, in percent.

Classes are texts or whole numbers; 3 and "3" are not the same.
"""

from __future__ import annotations

from collections.abc import Sequence

from redco_flow.spec.metric import check_pairs

KEYS = {"accuracy": "max"}
READS = "classes"

Class = str | int


def compute(
    predictions: Sequence[Class], references: Sequence[Sequence[Class]]
) -> dict[str, float]:
    """Return the percentage of predictions that are one of their references."""
    scores = per_example(predictions, references)["accuracy"]
    return {"accuracy": sum(scores) / len(scores)}


def per_example(
    predictions: Sequence[Class], references: Sequence[Sequence[Class]]
) -> dict[str, list[float]]:
    """Return 100.0 or 0.0 for each example."""
    check_pairs(predictions, references)
    pairs = zip(predictions, references, strict=True)
    return {"accuracy": [100.0 if found in wanted else 0.0 for found, wanted in pairs]}
