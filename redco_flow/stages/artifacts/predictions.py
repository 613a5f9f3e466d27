"""What stands in a predictions artifact: one JSON line per example, and what they come from."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from redco_flow.errors import ArtifactError
from redco_flow.records import read_json, read_json_lines, write_json

FORMAT = 1
LINES_FILE = "predictions.jsonl"
SUMMARY_FILE = "predictions.json"


@dataclass(frozen=True)
class Prediction:
    """One line of predictions.jsonl.

    Args:
        loss: summed cross-entropy of the first reference, in nats, where it was measured.
        num_tokens: how many tokens that is the sum of.
    """

    row_id: str
    source: str
    prediction: str
    references: list[str]
    loss: float | None = None
    num_tokens: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the line without what was not measured."""
        return {key: value for key, value in asdict(self).items() if value is not None}


@dataclass(frozen=True)
class PredictionsSummary:
    """`predictions.json`.

    Args:
        generation: the settings that texts were generated with.
        checkpoint, data: ids of the artifacts that they come from; `step` is the checkpoint's.
        config: digest of the predict stage's settings.
        most_frequent_target: of the training data: what a trivial model would say.
    """

    split: str
    num_examples: int
    generation: Mapping[str, Any]
    checkpoint: str
    step: int
    data: str
    config: str
    most_frequent_target: Mapping[str, Any]
    format: int = FORMAT

    def to_json(self) -> dict[str, Any]:
        """Return the record."""
        return asdict(self)


def write_predictions(
    folder: Path, predictions: Iterable[Prediction], summary: PredictionsSummary
) -> None:
    """Write an artifact's files into a new folder."""
    folder.mkdir(parents=True)
    # Half a surrogate pair has no UTF-8; written with a backslash it is JSON's own escape of it.
    with (folder / LINES_FILE).open("w", encoding="utf-8", errors="backslashreplace") as file:
        for prediction in predictions:
            file.write(json.dumps(prediction.to_json(), ensure_ascii=False) + "\n")
    write_json(folder / SUMMARY_FILE, summary.to_json())


def read_predictions(folder: Path) -> tuple[list[Prediction], PredictionsSummary]:
    """Read an artifact.

    Raises:
        ArtifactError: it is no predictions artifact, or not a whole one.
    """
    try:
        summary = PredictionsSummary(**read_json(folder / SUMMARY_FILE))
        lines = [Prediction(**line) for line in read_json_lines(folder / LINES_FILE)]
    except (FileNotFoundError, TypeError, ValueError) as error:
        raise ArtifactError(f"{folder}: no predictions of redco-flow: {error}") from error
    if len(lines) != summary.num_examples:
        raise ArtifactError(
            f"{folder}: {len(lines)} predictions where {summary.num_examples} should be."
        )
    return lines, summary
