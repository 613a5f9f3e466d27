"""Rows of all runs, sweeps and schedules of a workspace, for its page.

A row is kept as long as the time of change of its directory and of its records is the same, so
that a list of thousands costs two looks at each run. Nothing is written.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar

from redco_flow.cli.status import progress_text
from redco_flow.cli.sweep import state_of_sweep
from redco_flow.cli.view import LIVE_STATES, read_run_view
from redco_flow.errors import DamagedRecord
from redco_flow.report.numbers import seconds_between
from redco_flow.tracking.attempt import State
from redco_flow.tracking.deletions import find_run_deletion
from redco_flow.tracking.locks import find_holder
from redco_flow.tracking.notes import read_notes
from redco_flow.tracking.run_directory import RunDirectory
from redco_flow.tracking.run_metrics import read_metrics
from redco_flow.tracking.schedules import ScheduleDirectory, list_schedules
from redco_flow.tracking.sweep_directory import SweepDirectory
from redco_flow.tracking.workspace import Workspace

_T = TypeVar("_T")
Row = dict[str, Any]
# A file changed twice within one tick of its file system's clock (2 s on some) looks unchanged.
_MIN_AGE_NANOSECONDS = 2_000_000_000
_Identity = tuple[tuple[int, int, int], ...]


class Listing:
    """Reads the rows of one workspace again and again; may be used by several threads."""

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace
        self._known: dict[Path, tuple[_Identity, Any]] = {}
        self._lock = Lock()

    def read(self) -> dict[str, list[Row]]:
        """Return the rows as they are now, the newest first."""
        with self._lock:
            paths = _directories(self._workspace.runs)
            rows = [row for path in paths if (row := self._run(path)) is not None]
            rows.sort(key=lambda row: (row["sequence"], row["run"]), reverse=True)
            sweeps = [
                self._sweep(path, rows) for path in _directories(self._workspace.root / "sweeps")
            ]
            sweeps.sort(key=lambda row: row["created_at"], reverse=True)
            schedules = [self._schedule(one) for one in list_schedules(self._workspace)]
            return {"runs": rows, "sweeps": sweeps, "schedules": schedules}

    def _run(self, path: Path) -> Row | None:
        run = RunDirectory(path)
        row = self._remembered(path, (path, run.state_path), lambda: _read_row(run))
        if row is None or row["state"] not in LIVE_STATES:
            return row
        view = read_run_view(run)
        running = [
            f"{name}: {text}"
            for name, stage in view["stages"].items()
            if (text := progress_text(stage["progress"]))
        ]
        now = {"state": view["state"], "message": view["message"], "queued": view["queued"]}
        return {**row, **now, "progress": "  ".join(running)}

    def _sweep(self, path: Path, rows: Sequence[Row]) -> Row:
        sweep = SweepDirectory(path)
        try:
            record = self._remembered(path, (path / "sweep.json",), lambda: sweep.record)
            is_driven = find_holder(sweep) is not None
        except (DamagedRecord, OSError) as damage:
            return {"sweep": path.name, "state": "damaged", "created_at": "", "points": 0,
                    "completed": 0, "message": str(damage)}  # fmt: skip
        points = [row for row in rows if row["sweep"] == path.name]
        states = [
            State.WAITING if one["state"] == State.PENDING else one["state"] for one in points
        ]
        goes_on = is_driven or any(one["queued"] for one in points)
        return {
            "sweep": path.name,
            "state": state_of_sweep(states, goes_on=goes_on),
            "created_at": record.get("created_at", ""),
            "points": len(record["points"]),
            "completed": states.count(State.COMPLETED),
            "message": "",
        }

    def _schedule(self, directory: ScheduleDirectory) -> Row:
        path = directory.path
        files = (path / "schedule.json", path / "firings")
        return self._remembered(path, files, lambda: _read_schedule(directory))

    def _remembered(self, path: Path, files: Sequence[Path], read: Callable[[], _T]) -> _T:
        """Return what `read` does, or did when these files were as they are now."""
        identity = tuple(map(_identity, files))
        known = self._known.get(path)
        if known is not None and known[0] == identity:
            found: _T = known[1]
            return found
        made = read()
        if max(one[0] for one in identity) < time.time_ns() - _MIN_AGE_NANOSECONDS:
            self._known[path] = (identity, made)
        return made


def _identity(path: Path) -> tuple[int, int, int]:
    try:
        status = os.stat(path)
    except OSError:
        return (0, 0, 0)
    return status.st_mtime_ns, status.st_size, status.st_ino


def _directories(folder: Path) -> list[Path]:
    """The directories in a folder; a name with a leading dot is still being made."""
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in entries if entry.name[0] != "." and entry.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [folder / name for name in names]


def _read_row(run: RunDirectory) -> Row | None:
    """A run's row by its own records; None where it was deleted meanwhile."""
    row: Row = {
        "run": run.id, "pipeline": run.id.rpartition("-")[0], "sequence": -1, "sweep": "",
        "state": "damaged", "message": "", "progress": "", "queued": False, "metrics": {},
        "tags": [], "overrides": [], "profile": "", "user": "", "created_at": "",
        "started_at": None, "seconds": None, "damage": "", "is_deleted": False,
        "note": "", "labels": [], "edited_at": "",
    }  # fmt: skip
    damaged = []
    for read in (_of_record, _of_state, _of_notes):
        try:
            row |= read(run)
        except DamagedRecord as damage:
            damaged.append(str(damage))
    if damaged and not run.path.exists():
        return None
    row["damage"] = " ".join(damaged)
    return row | {"is_deleted": find_run_deletion(run) is not None}


def _of_record(run: RunDirectory) -> Row:
    kept = ("sequence", "sweep", "tags", "overrides", "profile", "user", "created_at")
    return {key: run.record[key] for key in kept if run.record.get(key)}


def _of_state(run: RunDirectory) -> Row:
    state = run.read_state()
    started, ended = state.get("started_at"), state.get("ended_at")
    return {
        "state": state["state"],
        "message": (state.get("message") or "").partition("\n")[0],
        "started_at": started,
        "seconds": seconds_between(started, ended) if ended else None,
        # JSON has neither NaN nor infinity.
        "metrics": {
            name: value if math.isfinite(value) else str(value)
            for name, value in read_metrics(state["stages"]).items()
        },
    }


def _of_notes(run: RunDirectory) -> Row:
    notes = read_notes(run)
    return {"note": notes.note, "labels": notes.labels, "edited_at": notes.edited_at}


def _read_schedule(directory: ScheduleDirectory) -> Row:
    row: Row = {"schedule": directory.name, "when": "", "pipeline": "", "last": "", "result": "",
                "run": "", "damage": ""}  # fmt: skip
    try:
        schedule = directory.read()
    except (DamagedRecord, OSError) as damage:
        return row | {"damage": str(damage)}
    row |= {"when": schedule.when, "pipeline": schedule.pipeline}
    if firings := directory.firings():
        last = firings[-1]
        row |= {"last": last.due, "result": last.told, "state": last.state}
        row |= {"run": last.run} if last.has_started_run else {}
    return row
