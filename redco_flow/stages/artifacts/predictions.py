"""The predictions artifact: one JSON line per example, and a record of their origin.

And what predictions are scored against, while a model is trained and afterwards.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from redco_flow.errors import ArtifactError
from redco_flow.metrics.confusion import Class, ClassNames
from redco_flow.records import read_json, read_json_lines, write_json, write_json_lines
from redco_flow.spec.metric import Metric, check_predictions, reads_of
from redco_flow.stages.artifacts.dataset import DatasetSummary
from redco_flow.stages.data.row_values import as_json_value
from redco_flow.tracking.dataset_rows import upright
from redco_flow.tracking.metrics_artifact import PREDICTIONS_FILE, Prediction

FORMAT = 1
SUMMARY_FILE = "predictions.json"


@dataclass(frozen=True)
class Targets:
    """The targets that predictions are scored against.

    Args:
        references: all those of each example.
        rows: what JSON has of each example's row, and the column to be predicted, whatever it is;
            empty mappings of texts.
    """

    references: Sequence[Sequence[Any]]
    rows: Sequence[Mapping[str, Any]]

    @classmethod
    def of_lines(cls, lines: Sequence[Prediction], target: str = "") -> Targets:
        """Return what the lines of an artifact were to predict.

        Args:
            target: the column, of rows.
        """
        rows = [with_target(line.row or {}, target, line.references) for line in lines]
        return cls([line.references for line in lines], rows)

    def of(self, metric: Metric) -> Sequence[Any]:
        """Return what a metric takes beside the predictions."""
        return self.rows if reads_of(metric) == "rows" else self.references

    def score(self, name: str, metric: Metric, predictions: Sequence[Any]) -> dict[str, float]:
        """Score predictions by a metric, which messages call `name`.

        Raises:
            ValueError: it cannot read them, or what it returns is no mapping.
        """
        check_predictions(name, metric, predictions)
        scores = metric.compute(predictions, self.of(metric))
        try:
            return {str(key): score for key, score in dict(scores).items()}
        except (TypeError, ValueError):
            raise ValueError(
                f"the metric '{name}' returned {reprlib.repr(scores)}: its `compute` returns a "
                "mapping from the names in KEYS to scores."
            ) from None


def warnings_on_keys(name: str, metric: Metric, scores: Mapping[str, float]) -> list[str]:
    """Return what is to be said where a metric's scores have other names than its `KEYS`."""
    extra = [f"'{key}'" for key in scores if key not in metric.KEYS]
    missing = [f"'{key}'" for key in metric.KEYS if key not in scores]
    found = []
    if extra:
        found.append(
            f"the metric '{name}' returned {', '.join(extra)}, not in its KEYS: no one knows "
            "whether more or less of it is better."
        )
    if missing:
        found.append(f"the metric '{name}' returned no {', '.join(missing)}, named in its KEYS.")
    return found


def targets_of(examples: Sequence[Mapping[str, Any]], summary: DatasetSummary) -> Targets:
    """Return what predictions for a dataset's examples are scored against."""
    if not summary.is_of_rows:
        return Targets([summary.references_of(row) for row in examples], [{} for _ in examples])
    targets = [_target_value(row.get(str(summary.target))) for row in examples]
    references = [[] if target is None else [target] for target in targets]
    rows = zip(map(plain_values, examples), references, strict=True)
    return Targets(
        references, [with_target(row, str(summary.target), found) for row, found in rows]
    )


def _target_value(value: Any) -> Any:
    """Return a value that JSON has; of an image its pixels."""
    is_image = type(value).__module__.startswith("PIL.")
    return as_json_value(np.asarray(upright(value)) if is_image else value)


def with_target(
    row: Mapping[str, Any], target: str, references: Sequence[Any]
) -> Mapping[str, Any]:
    """Return a row with the column to be predicted, which it lacks where that is an array."""
    return {**row, target: references[0]} if target and references else row


def plain_values(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return what JSON has of a row, without arrays, images and its id."""
    kept = {key: value for key, value in row.items() if not isinstance(value, np.ndarray)}
    found = {key: as_json_value(value) for key, value in kept.items() if key != "row_id"}
    return {key: value for key, value in found.items() if value is not None}


@dataclass(frozen=True)
class PredictionsSummary:
    """`predictions.json`.

    Args:
        generation: the settings that texts were generated with.
        checkpoint, data: ids of the artifacts that they come from; `step` is the checkpoint's.
        config: digest of the predict stage's settings.
        most_frequent_target: of the training data: what a trivial model would say; empty where
            that is not known.
        mean_target: likewise, where targets are numbers.
        target: of rows the column to be predicted, if there is one.
        classes, classes_are_ordered: the dataset's, where targets are classes.
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
    mean_target: float | None = None
    target: str | None = None
    classes: Sequence[Class] | None = None
    classes_are_ordered: bool | None = None

    @property
    def class_names(self) -> ClassNames | None:
        """The classes, in the form that metrics take; None of other targets."""
        return ClassNames.recorded(self.classes, are_ordered=self.classes_are_ordered)

    def to_json(self) -> dict[str, Any]:
        """Return the record without what these predictions do not have."""
        return {key: value for key, value in asdict(self).items() if value is not None}


def write_predictions(
    folder: Path, predictions: Iterable[Prediction], summary: PredictionsSummary
) -> None:
    """Write an artifact's files into a new folder."""
    folder.mkdir(parents=True)
    write_json_lines(folder / PREDICTIONS_FILE, (one.to_json() for one in predictions))
    write_json(folder / SUMMARY_FILE, summary.to_json())


def read_predictions(folder: Path) -> tuple[list[Prediction], PredictionsSummary]:
    """Read an artifact.

    Raises:
        ArtifactError: it is no predictions artifact, or not a whole one.
    """
    try:
        summary = PredictionsSummary(**read_json(folder / SUMMARY_FILE))
        lines = [Prediction(**line) for line in read_json_lines(folder / PREDICTIONS_FILE)]
    except (FileNotFoundError, TypeError, ValueError) as error:
        raise ArtifactError(f"{folder}: no predictions of redco-flow: {error}") from error
    if len(lines) != summary.num_examples:
        raise ArtifactError(
            f"{folder}: {len(lines)} predictions where {summary.num_examples} should be."
        )
    return lines, summary
