"""Where a run's stage has its result made by another run of the same sweep.

`<run>/stages/<stage>/shared.json`, written by the process that submits the sweep's jobs. It only
says what to wait for: without it, or once that attempt has failed, the run makes the result by
itself, and its own attempt from then on is the one that counts.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypedDict

from redco_flow.records import write_json
from redco_flow.tracking.attempt import AttemptDirectory
from redco_flow.tracking.run_directory import RunDirectory
from redco_flow.tracking.typed_records import find_record


class SharedRecord(TypedDict):
    """shared.json."""

    attempt: str
    own_attempts: int


def note_shared_attempt(run: RunDirectory, stage: str, attempt: AttemptDirectory) -> None:
    """Write down which attempt, of another run, makes what this run's stage would make.

    Raises:
        OSError: the disk is full or read-only; names the path.
    """
    path = _path(run, stage)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"attempt": str(attempt.path), "own_attempts": len(run.attempts(stage))})


def read_shared_attempt(run: RunDirectory, stage: str) -> AttemptDirectory | None:
    """Return the attempt of another run that makes the stage's result; None where none was noted.

    None, too, once the run has made an attempt of its own after that.

    Raises:
        DamagedRecord: the note is damaged.
    """
    record = find_record(_path(run, stage), SharedRecord)
    if record is None or len(run.attempts(stage)) > record["own_attempts"]:
        return None
    return AttemptDirectory(Path(record["attempt"]))


def current_attempt(run: RunDirectory, stage: str) -> AttemptDirectory | None:
    """Return the attempt, the run's own or another's, from which the stage's result is to come."""
    return read_shared_attempt(run, stage) or run.latest_attempt(stage)


def _path(run: RunDirectory, stage: str) -> Path:
    return run.path / "stages" / stage / "shared.json"
