"""The lines of predictions and metrics artifacts: one JSON object per example.

A comparison of two models needs the examples, not the means; trust in a number needs the
digests of what it was measured on.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from redco_flow.errors import ArtifactError
from redco_flow.records import read_json, read_json_lines, write_json, write_json_lines

PREDICTIONS_FILE = "predictions.jsonl"

FORMAT = 1
LINES_FILE = "per_example.jsonl"
SUMMARY_FILE = "metrics.json"
HARNESS_FILE = "lm_eval.json"  # what else lm-eval says of its tasks


@dataclass(frozen=True)
class Prediction:
    """One line of predictions.jsonl.

    Args:
        source: the text that was asked with; empty of rows that are no texts.
        prediction: the text, of several the first; of a recipe of rows any JSON value.
        references: of rows the value of the column to be predicted, if there is one.
        loss: summed cross-entropy of the first reference, in nats, where it was measured.
        num_tokens: how many tokens that is the sum of.
        num_bytes: how many bytes those tokens' text has; None of conversations. Windows of a text
            add up to the text's bytes, but a single one's may be below 0: a character that the
            window before it cut counts there as the three bytes of U+FFFD.
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


@dataclass(frozen=True)
class MetricsSummary:
    """`metrics.json`.

    Args:
        metrics: score by key, in percent.
        directions: "max" or "min" by key: which is better.
        modules: names of the metrics.
        settings: by metric: the settings that it computed with, of those that have some.
        baselines: by name: its text where it has only one, and its metrics.
        predictions, checkpoint, data: ids of the artifacts behind the scores.
        config: digest of the evaluate stage's settings.
        examples_digest: of the rows and references: equal where two evaluations can be compared.
        confusion: where classes were scored: `classes`, and `counts` by true and predicted class;
            the class None stands for all that are too rare to have a row.
        parts: where rows say which part of the data they are of: `num_examples` and `metrics` of
            each part; a metric that a part has too few examples for is left out.
        judged: where a judge found answers right or wrong: how many judgings ended how.
        warnings: why some of these scores may mean little.
    """

    metrics: Mapping[str, float]
    directions: Mapping[str, str]
    modules: list[str]
    baselines: Mapping[str, Mapping[str, Any]]
    num_examples: int
    split: str
    step: int
    predictions: str
    checkpoint: str
    data: str
    config: str
    examples_digest: str
    format: int = FORMAT
    confusion: Mapping[str, Any] | None = None
    parts: Mapping[str, Mapping[str, Any]] | None = None
    judged: Mapping[str, int] | None = None
    settings: Mapping[str, Mapping[str, Any]] | None = None
    warnings: list[str] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the record; what was not asked for is left out."""
        return {key: value for key, value in asdict(self).items() if value is not None}


def write_metrics(
    folder: Path, summary: MetricsSummary, lines: Iterable[Mapping[str, Any]]
) -> None:
    """Write an artifact's files; what an earlier attempt has left there goes.

    Args:
        lines: as of `read_metrics`.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_json_lines(folder / LINES_FILE, lines)
    write_json(folder / SUMMARY_FILE, summary.to_json())


def is_mean(score: float, values: Sequence[float]) -> bool:
    """Return whether a score is the mean of these, which are at least one."""
    if not all(map(math.isfinite, values)):
        return False
    return math.isclose(math.fsum(values) / len(values), score, abs_tol=1e-9)


def read_metrics(folder: Path) -> tuple[MetricsSummary, list[dict[str, Any]]]:
    """Read an artifact: its summary, and a line per example: row_id, scores, statistics.

    Raises:
        ArtifactError: it is no metrics artifact of an evaluation.
    """
    try:
        summary = MetricsSummary(**read_json(folder / SUMMARY_FILE))
        return summary, list(read_json_lines(folder / LINES_FILE))
    except (FileNotFoundError, TypeError, ValueError) as error:
        raise ArtifactError(f"{folder}: no evaluation of redco-flow: {error}") from error
