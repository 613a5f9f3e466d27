"""Fingerprints and published stage results, so that nothing is computed twice.

A result is written after its artifacts and stands only as long as they do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final, TypedDict

from redco_flow.errors import DamagedRecord
from redco_flow.records import digest_json, write_json, write_new_json
from redco_flow.tracking.artifacts import ArtifactStore
from redco_flow.tracking.locks import exclusive
from redco_flow.tracking.process_identity import utc_now
from redco_flow.tracking.typed_records import check_shape, find_record, unless_damaged
from redco_flow.tracking.workspace import SHORT_DIGITS, Workspace, check_name

_LATEST = "latest"  # results/latest/<pipeline>/<stage>.json: a view, rebuilt when missing


class IngredientsRecord(TypedDict, total=False):
    """The ingredients of a result that are read."""

    inputs: dict[str, list[str]]
    data: dict[str, Any]
    settings: dict[str, Any]
    code: dict[str, str]
    directories: list[list[str]]


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


def publish_result(
    workspace: Workspace, result: StageResult, check_lock: Callable[[], None] = lambda: None
) -> StageResult:
    """Publish a result, after its artifacts; a standing one with its fingerprint is kept.

    Args:
        check_lock: raises where this process has lost the lock of its fingerprint.

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
    check_lock()
    if not write_new_json(_path(workspace, result.fingerprint), asdict(result)):
        # Damaged, or published this moment by a process whose lock was taken from it.
        if (standing := find_result(workspace, result.fingerprint)) is not None:
            return standing
        check_lock()
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


def claim_result(workspace: Workspace, fingerprint: str) -> StageResult | None:
    """Return a result to be reused, if it can be trusted; its artifacts are not deleted any more.

    Call it when the run's records name the fingerprint, or with its work directory's lock held.
    """
    found = find_result(workspace, fingerprint)
    return None if found is None else hold_result(workspace, fingerprint)


def hold_result(workspace: Workspace, fingerprint: str) -> StageResult | None:
    """As `claim_result`, of a result that was verified or published just now; reads no artifact."""
    with exclusive(workspace.artifacts_lock):  # `tracking.garbage_collection` deletes under it
        return find_new_result(workspace, fingerprint)


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
    """Inputs that were not verified then, and that are damaged, or were published again since."""
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
        find_result_file(_path(workspace, fingerprint))
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
    return unless_damaged(lambda: find_result_file(path))


def find_result_file(path: Path) -> StageResult | None:
    """Return the result in a file; None where there is no file.

    Raises:
        DamagedRecord: it is damaged.
    """
    result = find_record(path, StageResult)
    if result is not None:
        check_shape(result.ingredients, IngredientsRecord, path)
        check_shape(result.origins, dict[str, dict[str, Any]], path)
    return result


# {"kind": str, "settings": {…}, "inputs": {slot: [artifact id]}, "data": {name: sha256 or
#  identity}, "code": {module: sha256}}; where settings have directories whose files are in `data`,
#  "directories": [[key of the setting, …], …]: these paths are a record, and no part of the digest
Ingredients = Mapping[str, Any]

ABSENT: Final = "(absent)"
_ORDER = ("kind", "settings", "data", "inputs", "code")  # what a person would suspect first


@dataclass(frozen=True)
class Difference:
    """One ingredient that differs.

    Args:
        key: its dotted path, such as `settings.learning_rate` or `code.my_package.my_recipe`.
        old: its value before, or ABSENT.
        new: its value now, or ABSENT.
    """

    key: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.key}: {_shown(self.old)} → {_shown(self.new)}"


def fingerprint(ingredients: Ingredients) -> str:
    """Return the digest of the ingredients, 64 hex digits.

    Raises:
        ValueError: a NaN or infinite setting.
        TypeError: something that is not JSON.
    """
    return digest_json(_identifying(ingredients))


def _identifying(ingredients: Ingredients) -> Ingredients:
    """Return the ingredients without the paths of directories whose files are in `data`."""
    settings = ingredients.get("settings", {})
    for path in ingredients.get("directories", ()):
        settings = _without(settings, path)
    return {**ingredients, "settings": settings} if "directories" in ingredients else ingredients


def _without(values: Any, path: Sequence[str]) -> Any:
    if not path or not isinstance(values, Mapping) or path[0] not in values:
        return values if path else None
    return {**values, path[0]: _without(values[path[0]], path[1:])}


def differences(old: Ingredients, new: Ingredients) -> Iterator[Difference]:
    """Yield every ingredient that differs.

    Kind and settings come first, then data, inputs, code: a changed setting explains a changed
    input, not the reverse.
    Which paths are of directories whose files are in `data` is not listed, nor is such a path that
    differs where both sides have one there.
    """
    both = [path for path in old.get("directories", ()) if path in new.get("directories", ())]
    old, new = (_identifying({**one, "directories": both}) for one in (old, new))
    others = sorted((set(old) | set(new)) - {*_ORDER, "directories"})
    for section in (*_ORDER, *others):
        yield from _compare(section, old.get(section, ABSENT), new.get(section, ABSENT))


def _compare(key: str, old: Any, new: Any) -> Iterator[Difference]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for name in (*new, *(name for name in old if name not in new)):
            yield from _compare(f"{key}.{name}", old.get(name, ABSENT), new.get(name, ABSENT))
    elif digest_json(old) != digest_json(new):
        # By digest, as fingerprints are: 1 and 1.0 and true are equal to Python only.
        yield Difference(key, old, new)


def _shown(value: Any) -> str:
    """A value for people; a digest by its first 12 digits."""
    if isinstance(value, str):
        is_digest = len(value) == 64 and set(value) <= set("0123456789abcdef")
        return value[:12] if is_digest else value
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_shown(item) for item in value) + "]"
    return str(value)
