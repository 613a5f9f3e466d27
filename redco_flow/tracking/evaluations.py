"""Evaluations of a checkpoint, and why two of them do not say which checkpoint is better."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from redco_flow.errors import some_of
from redco_flow.records import read_json
from redco_flow.tracking.artifacts import Artifact, ArtifactStore
from redco_flow.tracking.metrics_artifact import HARNESS_FILE
from redco_flow.tracking.results import StageResult, read_result
from redco_flow.tracking.score_identity import of_evaluation
from redco_flow.tracking.workspace import Workspace

_MOST_NAMED = 3


def evaluations_of(workspace: Workspace, checkpoint_id: str) -> list[Artifact]:
    """Return the metrics artifacts that were measured on a checkpoint, the latest first."""
    found = ArtifactStore(workspace).list("metrics")
    return [one for one in reversed(found) if one.metadata.get("checkpoint") == checkpoint_id]


def scores_of(evaluation: Artifact) -> Mapping[str, float]:
    """Return an evaluation's scores by key."""
    scores: Mapping[str, float] = evaluation.metadata.get("metrics", {})
    return scores


def why_partial(workspace: Workspace, evaluation: Artifact) -> str:
    """Say why an evaluation does not speak for its whole split; empty where it does."""
    metadata, name = evaluation.metadata, f"evaluation {evaluation.short_id}"
    result = _result_of(workspace, evaluation)
    if result is not None and result.kind == "harness":  # its rows are the tasks', in no dataset
        first = (result.ingredients.get("settings") or {}).get("num_examples")
        if not first or not (cut := _cut_tasks(evaluation)):
            return ""
        return f"{name} is partial: the first {first} rows of {some_of(cut, _MOST_NAMED)}."
    split, num_examples = metadata.get("split"), metadata.get("num_examples")
    data = str(metadata.get("data", ""))
    dataset = ArtifactStore(workspace).find(data)
    counts = dataset.metadata.get("splits", {}).get(split, {}) if dataset else {}
    if "rows" not in counts:
        return (
            f"{name} may be a partial one: its dataset {data[:12]} is gone, and nothing else says "
            f"how many rows '{split}' has."
        )
    if num_examples != counts["rows"]:
        return (
            f"{name} is partial: {num_examples} of the {counts['rows']} rows of '{split}' "
            "(num_examples of its predict stage)."
        )
    return ""


def _cut_tasks(evaluation: Artifact) -> list[str]:
    """Return which of lm-eval's tasks have more rows than were evaluated."""
    try:
        counts = read_json(evaluation.path / HARNESS_FILE)["n-samples"].items()
    except FileNotFoundError:
        return ["each task"]
    return [task for task, of_task in counts if of_task["effective"] < of_task["original"]]


def why_not_comparable(workspace: Workspace, ours: Artifact, theirs: Artifact, key: str) -> str:
    """Say why a difference of two evaluations tells nothing of the checkpoints.

    Returns:
        Empty where it does: both measured all rows of the same split by the same code, and decoded
        by the same settings.
    """
    for evaluation in (ours, theirs):
        if why := why_partial(workspace, evaluation):
            return why
    pair = f"evaluations {ours.short_id} and {theirs.short_id}"
    one, other = ours.metadata, theirs.metadata
    first, second = (of_evaluation(it, _result_of(workspace, it), key) for it in (ours, theirs))
    if reason := second.comparable_with(first):
        rows = f"{_rows_of(one)}, and {_rows_of(other)}"
        return f"{pair} cannot be compared by '{key}': {reason}; {rows}."
    if one.get("data") != other.get("data"):
        return f"{pair} are of other datasets: {_rows_of(one)}, and {_rows_of(other)}."
    if decoding := list(_other_decoding(workspace, ours, theirs)):
        return f"{pair} were decoded by other settings: {some_of(decoding, _MOST_NAMED)}."
    if code := list(_other_code(workspace, ours, theirs)):
        return f"{pair} were measured by other code: {some_of(code, _MOST_NAMED)}."
    return ""


def _rows_of(metadata: Mapping[str, Any]) -> str:
    data, split = str(metadata.get("data", "?"))[:12], metadata.get("split", "?")
    return f"{metadata.get('num_examples', '?')} of '{split}' of dataset {data}"


def _other_decoding(workspace: Workspace, ours: Artifact, theirs: Artifact) -> Iterator[str]:
    one, other = _generation(workspace, ours), _generation(workspace, theirs)
    for key in dict.fromkeys((*one, *other)) if one and other else ():
        if one.get(key) != other.get(key):
            yield f"{key} {one.get(key)} and {other.get(key)}"


def _generation(workspace: Workspace, evaluation: Artifact) -> Mapping[str, Any]:
    """The settings that the predictions were generated with; empty where those are gone."""
    found = ArtifactStore(workspace).find(str(evaluation.metadata.get("predictions", "")))
    settings: Mapping[str, Any] = found.metadata.get("generation", {}) if found else {}
    return settings


def _other_code(workspace: Workspace, ours: Artifact, theirs: Artifact) -> Iterator[str]:
    our_code, their_code = _code_of(workspace, ours), _code_of(workspace, theirs)
    if not our_code or not their_code:
        yield "which code it was is not recorded any more"
    # What only one of them imported belongs to a metric that the other was not asked for.
    for name, digest in our_code.items():
        if their_code.get(name, digest) != digest:
            yield name


def _code_of(workspace: Workspace, evaluation: Artifact) -> Mapping[str, str]:
    """Digests of the modules that an evaluation was made by; empty where its result is gone."""
    result = _result_of(workspace, evaluation)
    return result.ingredients.get("code", {}) if result is not None else {}


def _result_of(workspace: Workspace, evaluation: Artifact) -> StageResult | None:
    return read_result(workspace, str(evaluation.produced_by.get("fingerprint", "")))
