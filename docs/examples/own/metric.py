"""How far off the numbers are that were generated."""

from collections.abc import Sequence

KEYS = {"absolute_error": "min"}  # the names of the scores, and which direction is better


def compute(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
    """Score the whole set."""
    errors = per_example(predictions, references)["absolute_error"]
    return {"absolute_error": sum(errors) / len(errors)}


def per_example(
    predictions: Sequence[str], references: Sequence[Sequence[str]]
) -> dict[str, list[float]]:
    """Score each example; may be left out where examples cannot be scored alone."""
    pairs = zip(predictions, references, strict=True)
    return {"absolute_error": [abs(_number(text) - int(texts[0])) for text, texts in pairs]}


def _number(text: str) -> float:
    return float(text) if text.strip().isdigit() else 100.0
