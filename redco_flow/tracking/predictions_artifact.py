"""The lines of a predictions artifact: one JSON object per example, in `predictions.jsonl`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

LINES_FILE = "predictions.jsonl"


@dataclass(frozen=True)
class Prediction:
    """One line of predictions.jsonl.

    Args:
        source: the text that was asked with; empty of rows that are no texts.
        prediction: the text, of several the first; of a recipe of rows any JSON value.
        references: of rows the value of the column to be predicted, if there is one.
        loss: summed cross-entropy of the first reference, in nats, where it was measured.
        num_tokens: how many tokens that is the sum of.
        num_bytes: how many bytes those tokens' text has; None of conversations.
        predictions: all texts, `prediction` first, where `num_return_sequences` asked for several.
        probabilities: of each class, where the stage was to write them.
        row: what JSON has of a row, without arrays and images.
        part: of the data, where rows say it.
    """

    row_id: str
    source: str
    prediction: Any
    references: list[Any]
    loss: float | None = None
    num_tokens: int | None = None
    num_bytes: int | None = None
    predictions: list[str] | None = None
    probabilities: dict[str, float] | None = None
    row: dict[str, Any] | None = None
    part: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the line without what was not measured."""
        values = asdict(self).items()
        return {key: one for key, one in values if one is not None or key == "prediction"}
