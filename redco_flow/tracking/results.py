"""Published stage results: what a fingerprint gave, so that nothing is computed twice.

A result is written after its artifacts and stands only as long as they do. Knows nothing of
how a fingerprint is made (`fingerprint.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypedDict

from redco_flow.errors import DamagedRecord
from redco_flow.records import write_json
from redco_flow.tracking.artifacts import ArtifactStore
from redco_flow.tracking.clock import utc_now
from redco_flow.tracking.typed_records import check_shape, find_record, unless_damaged
from redco_flow.tracking.workspace import SHORT_DIGITS, Workspace, check_name

_LATEST = "latest"  # results/latest/<pipeline>/<stage>.json: a view, rebuilt when missing


class IngredientsRecord(TypedDict, total=False):
    """What is read out of a result's ingredients."""

    inputs: dict[str, list[str]]
    data: dict[str, Any]
    settings: dict[str, Any]
    code: dict[str, str]


class PointerRecord(TypedDict):
    """results/latest/<pipeline>/<stage>.json."""

    fingerprint: str


@dataclass(frozen=True)
class StageResult:
    """One stage's result and everything that made it.

    Args:
        fingerprint: 64 hex digits, of the ingredients.
        pipeline: the pipeline's name.
        stage: the stage's name.
        kind: the stage's kind.
        ingredients: what determines it (`fingerprint.Ingredients`).
        outputs: output name to artifact id.
        metrics: the stage's metrics, if it has any.
        run: the run that computed it.
        attempt: the attempt that did.
        seconds: how long that took.
        created_at: when, for people.
        code: commit, dirty, patch_digest.
        origins: where each of the stage's settings came from, `{"source", "line", "column"}`.
        host: where it ran.
        versions: package to version.
        sequence: its place in the workspace's order; given by `publish_result`.
        inputs_verified: whether the digests of its inputs were compared with their manifests
            before and after they were read.
    """

    fingerprint: str
    pipeline: str
    stage: str
    kind: str
    ingredients: dict[str, Any]
    outputs: dict[str, str]
    metrics: dict[str, float] | None = None
    run: str = ""
    attempt: int = 0
    seconds: float = 0.0
    created_at: str = field(default_factory=utc_now)
    code: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, Any] = field(default_factory=dict)
    host: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    sequence: int = 0
    inputs_verified: bool = False


def publish_result(workspace: Workspace, result: StageResult) -> StageResult:
    """Publish a result, after its artifacts; a standing one with its fingerprint is kept.

    Returns:
        The result that stands.

    Raises:
        OSError: the disk is full or read-only; names the path.
        UsageError: pipeline or stage is not a name.
    """
    if (standing := find_result(workspace, result.fingerprint)) is not None:
        return standing
    result = replace(result, sequence=workspace.next_sequence())
    pointer = _pointer(workspace, result.pipeline, result.stage)
    write_json(_path(workspace, result.fingerprint), asdict(result))
    pointer.parent.mkdir(parents=True, exist_ok=True)
    latest = _pointed_at(workspace, pointer)
    if latest is None or latest.sequence < result.sequence:
        write_json(pointer, {"fingerprint": result.fingerprint})
    return result


def find_result(workspace: Workspace, fingerprint: str) -> StageResult | None:
    """Return the result with this fingerprint, if it can be trusted (`faults_of`)."""
    result = read_result(workspace, fingerprint)
    return None if result is None or faults_of(workspace, result) else result


def find_new_result(workspace: Workspace, fingerprint: str) -> StageResult | None:
    """Return a result that was published just now, if its artifacts are there; reads none."""
    result = read_result(workspace, fingerprint)
    store = ArtifactStore(workspace)
    is_there = result is not None and all(map(store.is_whole, result.outputs.values()))
    return result if is_there else None


def faults_of(workspace: Workspace, result: StageResult) -> list[str]:
    """Return why a result must not be reused, one sentence each; empty when it can be.

    Every byte of its artifacts is what was published, and so was every byte that it was made from.
    """
    store = ArtifactStore(workspace)
    damage = [one for artifact_id in result.outputs.values() for one in store.damage(artifact_id)]
    return damage or list(_doubtful_inputs(store, result))


def is_doubtful(workspace: Workspace, fingerprint: str) -> bool:
    """Say whether the result with this fingerprint may have been made from damaged bytes."""
    result = read_result(workspace, fingerprint)
    return result is not None and any(_doubtful_inputs(ArtifactStore(workspace), result))


def _doubtful_inputs(store: ArtifactStore, result: StageResult) -> Iterator[str]:
    """Inputs that were not verified then, and that are damaged, or were published anew since."""
    if result.inputs_verified:
        return
    ids = {one for taken in result.ingredients.get("inputs", {}).values() for one in taken}
    for artifact_id in sorted(ids):
        artifact = store.find(artifact_id)
        since = artifact.manifest.get("sequence", 0) if artifact else 0
        if artifact is None or since > result.sequence or not store.is_intact(artifact_id):
            yield f"it was made from artifact {artifact_id[:SHORT_DIGITS]} while that was damaged"


def read_result(workspace: Workspace, fingerprint: str) -> StageResult | None:
    """Return the result with this fingerprint whether its artifacts stand or not."""
    return _read(_path(workspace, fingerprint))


def find_damage(workspace: Workspace, fingerprint: str) -> DamagedRecord | None:
    """Return what is wrong with the record of a result; None where it is whole or not there."""
    try:
        _find(_path(workspace, fingerprint))
    except DamagedRecord as damage:
        return damage
    return None


def forget_result(workspace: Workspace, fingerprint: str) -> None:
    """Remove a result, so that its stage runs again; its artifacts stay."""
    _path(workspace, fingerprint).unlink(missing_ok=True)


def latest_result(workspace: Workspace, pipeline: str, stage: str) -> StageResult | None:
    """Return the result of this stage that was published last, or None."""
    result = _pointed_at(workspace, _pointer(workspace, pipeline, stage))
    if result is not None:
        return result
    found = (
        one for one in list_results(workspace) if (one.pipeline, one.stage) == (pipeline, stage)
    )
    return max(found, key=lambda one: one.sequence, default=None)


def list_results(workspace: Workspace) -> Iterator[StageResult]:
    """Yield all results, in no order."""
    for path in workspace.results.glob("*.json"):
        if (result := _read(path)) is not None:
            yield result


def _path(workspace: Workspace, fingerprint: str) -> Path:
    return workspace.results / f"{fingerprint}.json"


def _pointer(workspace: Workspace, pipeline: str, stage: str) -> Path:
    folder = workspace.results / _LATEST / check_name(pipeline, "pipeline name")
    return folder / f"{check_name(stage, 'stage name')}.json"


def _pointed_at(workspace: Workspace, pointer: Path) -> StageResult | None:
    """The result that a pointer to the latest one names; it is a view and may be damaged."""
    record = unless_damaged(lambda: find_record(pointer, PointerRecord))
    return _read(_path(workspace, record["fingerprint"])) if record else None


def _read(path: Path) -> StageResult | None:
    """Read one result; None where there is none, or one that is damaged, which is said."""
    return unless_damaged(lambda: _find(path))


def _find(path: Path) -> StageResult | None:
    """One result, or None where there is none.

    Raises:
        DamagedRecord: it is damaged.
    """
    result = find_record(path, StageResult)
    if result is not None:
        check_shape(result.ingredients, IngredientsRecord, path)
        check_shape(result.origins, dict[str, dict[str, Any]], path)
    return result
