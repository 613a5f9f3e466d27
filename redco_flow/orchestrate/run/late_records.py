"""Wait for the records of a completed job, which a network file system may show late here."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

from redco_flow.errors import DamagedRecord, StageFailed
from redco_flow.records import list_directory
from redco_flow.tracking.artifacts import ArtifactStore
from redco_flow.tracking.attempt import AttemptDirectory
from redco_flow.tracking.results import StageResult, find_new_result, read_result
from redco_flow.tracking.workspace import SHORT_DIGITS, Workspace

_SECONDS_BETWEEN_LOOKS = 0.5


def await_result(
    workspace: Workspace,
    attempt: AttemptDirectory,
    *,
    seconds: float,
    while_waiting: Callable[[str, float], None],
) -> StageResult:
    """Return the result of an attempt whose job has completed.

    Each look lists the directory of what is missing: NFS then asks its server again.

    Args:
        seconds: how long to wait for the records; 0 where the job ended on this host.
        while_waiting: called between two looks with what is not visible and for how many seconds
            to sleep; may raise to give up.

    Raises:
        StageFailed: they have not appeared; names the directory and how long was waited.
    """
    started_at = time.monotonic()
    while True:
        missing = attempt.result_path
        with contextlib.suppress(DamagedRecord):  # its name may be visible before its content is
            record = attempt.read_result()
            if record is not None:
                result = find_new_result(workspace, record["fingerprint"])
                if result is not None:
                    return result
                missing = _missing(workspace, record["fingerprint"])
        waited = time.monotonic() - started_at
        if waited >= seconds:
            raise StageFailed(_explain(attempt, missing, waited if seconds else 0.0))
        while_waiting(f"{missing.name} to appear in {missing.parent}", _SECONDS_BETWEEN_LOOKS)
        list_directory(missing.parent)
        list_directory(missing)


def _missing(workspace: Workspace, fingerprint: str) -> Path:
    """The first record or file of a published result that cannot be read here."""
    result = read_result(workspace, fingerprint)
    if result is None:
        return workspace.results / f"{fingerprint}.json"
    store = ArtifactStore(workspace)
    for name, artifact_id in result.outputs.items():
        directory = workspace.artifacts / name.partition("/")[0] / artifact_id[:SHORT_DIGITS]
        artifact = store.find(artifact_id)
        if artifact is None:
            return directory / "manifest.json"
        for entry in artifact.manifest["files"]:
            path = artifact.path / entry["path"]
            with contextlib.suppress(OSError):  # ESTALE
                if path.is_file():
                    continue
            return path
    return workspace.artifacts


def _explain(attempt: AttemptDirectory, missing: Path, waited: float) -> str:
    waiting = f" after {waited:.0f} s" if waited else ""
    return (
        f"stage '{attempt.stage}': its job completed, but {missing.name} is not visible in "
        f"{missing.parent}{waiting}. If `ls {missing.parent}` shows it on another node, the file "
        f"system shows new files late here (`redco-flow doctor` measures it): "
        f"`redco-flow resume` uses it once it is visible. If no node has it, it was deleted: "
        f"`redco-flow retry` computes it again."
    )
