"""Macro F1, in percent: the mean of the classes' F1, in which rare classes count like others.

The classes are those that are true or predicted of some example.
"""

from __future__ import annotations

from collections.abc import Sequence

from redco_flow.metrics.confusion import Class, classes_of, confusion, f1_of

KEYS = {"f1_macro": "max"}
READS = "classes"


def compute(
    predictions: Sequence[Class], references: Sequence[Sequence[Class]]
) -> dict[str, float]:
    """Return the mean of the F1 of every class."""
    counts = confusion(predictions, references)
    scores = [f1_of(counts, one) for one in classes_of(counts)]
    return {"f1_macro": 100 * sum(scores) / len(scores)}
