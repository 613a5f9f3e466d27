"""The reference_scores artifact: log-likelihoods of each row's answers under the reference.

`reference_scores.json`, and of each split a file of JSON lines, {"row_id", "chosen", "rejected"}:
log-likelihoods of the answers in nats, summed over their tokens, in the dataset's order.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from redco_flow.errors import ArtifactError, RedcoFlowError
from redco_flow.records import read_json, read_json_lines, write_json
from redco_flow.runtime.context import StageContext

FORMAT = 1
SUMMARY_FILE = "reference_scores.json"
ANSWERS = ("chosen", "rejected")

Columns = Mapping[str, list[float]]


class WrongReference(RedcoFlowError):
    """The scores are of other rows than those that are read."""


@dataclass(frozen=True)
class ReferenceScoresSummary:
    """`reference_scores.json`.

    Args:
        data: id of the dataset artifact whose rows were scored.
        reference: id of the checkpoint that scored them, or the model's name.
        num_rows: by split.
    """

    data: str
    reference: str
    num_rows: Mapping[str, int]
    format: int = FORMAT


def scores_file(split: str) -> str:
    """Return the name of the file with a split's scores."""
    return f"{split}.jsonl"


def write_scores(path: Path, row_ids: Iterable[str], scores: Iterable[Mapping[str, Any]]) -> None:
    """Write a split's scores; a file that is there is whole.

    Args:
        scores: `chosen_log_likelihood` and `rejected_log_likelihood` of each row.
    """
    unfinished = path.with_suffix(".unfinished")
    with unfinished.open("w", encoding="utf-8") as file:
        for row_id, one in zip(row_ids, scores, strict=True):
            values = {name: one[f"{name}_log_likelihood"] for name in ANSWERS}
            file.write(json.dumps({"row_id": row_id, **values}, ensure_ascii=False) + "\n")
    unfinished.replace(path)


def write_summary(folder: Path, summary: ReferenceScoresSummary) -> None:
    """Write what tells whose scores the folder has."""
    write_json(folder / SUMMARY_FILE, asdict(summary))


def reference_columns(context: StageContext) -> dict[str, Columns]:
    """Return by split what a stage's input `reference_scores` adds to each row of its dataset.

    `reference_chosen` and `reference_rejected`; nothing where there is no such input.

    Raises:
        WrongReference: the scores are of another dataset.
        ArtifactError: it is no such artifact, or not a whole one.
    """
    if not context.inputs.get("reference_scores"):
        return {}
    folder, dataset_id = context.input("reference_scores").path, context.input("dataset").id
    try:
        summary = ReferenceScoresSummary(**read_json(folder / SUMMARY_FILE))
    except (FileNotFoundError, TypeError, ValueError) as error:
        raise ArtifactError(f"{folder}: no reference scores of redco-flow: {error}") from error
    if summary.data != dataset_id:
        raise WrongReference(
            f"the reference scores are of dataset {summary.data[:12]}, and this stage reads "
            f"{dataset_id[:12]}: let the stage that scores take the same `dataset`."
        )
    return {split: _columns(folder, split, count) for split, count in summary.num_rows.items()}


def _columns(folder: Path, split: str, num_rows: int) -> Columns:
    lines = list(read_json_lines(folder / scores_file(split)))
    if len(lines) != num_rows:
        raise ArtifactError(f"{folder}: {len(lines)} scores of '{split}', not {num_rows}.")
    return {f"reference_{name}": [float(line[name]) for line in lines] for name in ANSWERS}
