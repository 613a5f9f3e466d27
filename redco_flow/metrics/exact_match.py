"""Exact match: the share of predictions equal to one of their references, in percent.

Runs of white space count as one space and the ends are stripped; case and punctuation count.
"""

from __future__ import annotations

from collections.abc import Sequence

from redco_flow.spec.metric import check_pairs

KEYS = {"exact_match": "max"}


def compute(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
    """Return the percentage of predictions that equal one of their references."""
    scores = per_example(predictions, references)["exact_match"]
    return {"exact_match": sum(scores) / len(scores)}


def per_example(
    predictions: Sequence[str], references: Sequence[Sequence[str]]
) -> dict[str, list[float]]:
    """Return 100.0 or 0.0 for each example."""
    check_pairs(predictions, references)
    return {
        "exact_match": [
            100.0 if _normalise(text) in map(_normalise, texts) else 0.0
            for text, texts in zip(predictions, references, strict=True)
        ]
    }


def _normalise(text: str) -> str:
    return " ".join(text.split())
