"""Records of deleted bytes: deleted.json beside an artifact's manifest, or in a run's directory.

Manifests, results and records of runs stay, so lineage, states and metrics can still be read.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

from redco_flow.errors import ArtifactError
from redco_flow.records import moment, write_json
from redco_flow.tracking.artifacts import Artifact
from redco_flow.tracking.process_identity import utc_now
from redco_flow.tracking.run_directory import RunDirectory
from redco_flow.tracking.typed_records import find_record, unless_damaged
from redco_flow.tracking.workspace import Workspace, user_name

_RECORD = "deleted.json"


class DeletionRecord(TypedDict):
    """deleted.json: when and by whose command."""

    time: str
    by: str
    command: str


def new_deletion(command: str) -> DeletionRecord:
    """Return the record of a deletion now.

    Args:
        command: as a person typed it.
    """
    by = f"{user_name()}@{os.uname().nodename}"
    return {"time": utc_now(), "by": by, "command": command}


def find_deletion(artifact: Artifact) -> DeletionRecord | None:
    """Return the record of the deletion of an artifact's files; None while they are there."""
    return None if os.path.lexists(artifact.path) else _find(artifact.directory)


def find_run_deletion(run: RunDirectory) -> DeletionRecord | None:
    """Return the record of the deletion of what only this run used; None where it was not."""
    return _find(run.path)


def _find(folder: Path) -> DeletionRecord | None:
    return unless_damaged(lambda: find_record(folder / _RECORD, DeletionRecord))


def write_deletion(folder: Path, deletion: DeletionRecord) -> None:
    """Write the record of a deletion into an artifact's or a run's directory.

    Raises:
        OSError: the disk is full or read-only; names the path.
    """
    write_json(folder / _RECORD, deletion)


def forget_deletion(run: RunDirectory) -> None:
    """Remove a run's record, for it runs again."""
    (run.path / _RECORD).unlink(missing_ok=True)


def deletion_text(deletion: DeletionRecord) -> str:
    """Return a deletion in words: when, by whom, with which command."""
    by, command = deletion["by"], deletion["command"]
    return f"deleted {moment(deletion['time'])} by {by} (`{command}`)"


def refuse_deleted(workspace: Workspace, artifact: Artifact) -> None:
    """Raise where an artifact's files were deleted.

    Raises:
        ArtifactError: names the deletion, and the command that makes the artifact again.
    """
    if (deletion := find_deletion(artifact)) is not None:
        raise ArtifactError(
            f"{artifact.kind} {artifact.short_id} was {deletion_text(deletion)}. "
            f"{_how_to_make(workspace, artifact)}"
        )


def _how_to_make(workspace: Workspace, artifact: Artifact) -> str:
    run = RunDirectory(workspace.runs / str(artifact.produced_by.get("run", "")))
    record = unless_damaged(lambda: run.record) or {}
    if not (words := repeatable(record.get("argv", [])[1:])):
        return f"A new run of its pipeline makes it again{_same_id(artifact)}."
    return f"To make it again{_same_id(artifact)}: `{shlex.join(['redco-flow', *words])}`."


def repeatable(words: Sequence[str]) -> list[str]:
    """Return a command without the options that keep it from running a second time."""
    found: list[str] = []
    is_value = False
    for word in words:
        name = word.partition("=")[0]
        if not is_value and name not in (*_ONCE, "--if-new"):
            found.append(word)
        is_value = not is_value and word in _ONCE
    return found


_ONCE = ("--run-id", "--since")


def _same_id(artifact: Artifact) -> str:
    """Promise the id; not of an earlier version's checkpoint, whose id left its state out."""
    files = [file["path"] for file in artifact.manifest["files"]]
    has_state, identified = (
        any(path.startswith("checkpoint/training/") for path in paths)
        for paths in (files, artifact.manifest.get("identity", files))
    )
    return ", with the same id" if identified or not has_state else ""
