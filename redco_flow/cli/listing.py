"""Rows of all runs, sweeps and schedules of a workspace, for its page.

A row is kept as long as the time of change of its directory and of its records is the same, so
that a list of thousands costs four looks at each run. Nothing is written, no cluster is asked.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec

from redco_flow.cli.status import progress_text
from redco_flow.cli.sweep_view import state_of_sweep
from redco_flow.cli.view import LIVE_STATES, read_run_view
from redco_flow.errors import DamagedRecord
from redco_flow.report.numbers import duration, score, seconds_between, short_moment, state_mark
from redco_flow.report.rendering import render_table
from redco_flow.report.runs_page import Cell, Table
from redco_flow.tracking.attempt import State
from redco_flow.tracking.deletions import find_run_deletion
from redco_flow.tracking.locks import find_holder
from redco_flow.tracking.notes import RECORD as NOTES
from redco_flow.tracking.notes import read_notes
from redco_flow.tracking.process_identity import utc_now
from redco_flow.tracking.run_directory import RunDirectory
from redco_flow.tracking.run_metrics import read_metrics
from redco_flow.tracking.schedules import ScheduleDirectory, list_schedules
from redco_flow.tracking.sweep_directory import SweepDirectory
from redco_flow.tracking.workspace import Workspace

_T = TypeVar("_T")
Row = dict[str, Any]
# A file changed twice within one tick of its file system's clock (2 s on some) looks unchanged.
_MIN_AGE_NANOSECONDS = 2_000_000_000
_SECONDS_OF_AN_ANSWER = 2.0
_Identity = list[tuple[int, int, int]]
_RECORDS = ("state.json", "run.json", NOTES)


class Listing:
    """Reads the rows of one workspace again and again; may be used by several threads."""

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace
        self._known: dict[Path, tuple[_Identity, Any]] = {}
        self._lock = Lock()
        self._encoded, self._due = b"", 0.0

    def encoded(self, *, is_fresh: bool = False) -> bytes:
        """Return the rows as JSON, at most 2 s old: all tabs get the same answer.

        Args:
            is_fresh: read them now.
        """
        with self._lock:
            if is_fresh or time.monotonic() >= self._due:
                self._encoded = encode_json(self._read())
                self._due = time.monotonic() + _SECONDS_OF_AN_ANSWER
            return self._encoded

    def _read(self) -> dict[str, Any]:
        """Return the runs, the newest first, and the tables of sweeps and schedules."""
        folders = (self._workspace.runs, self._workspace.root / "sweeps")
        runs, sweeps = map(_directories, folders)
        schedules = list_schedules(self._workspace)
        present = {*runs, *sweeps, *(one.path for one in schedules)}
        self._known = {path: one for path, one in self._known.items() if path in present}
        rows = [row for path in runs if (row := self._run(path)) is not None]
        rows.sort(key=lambda row: (row["sequence"], row["run"]), reverse=True)
        points = defaultdict(list)
        for row in rows:
            points[row["sweep"]].append(row)
        of_sweeps = [self._sweep(path, points[path.name]) for path in sweeps]
        of_sweeps.sort(key=lambda row: row[3].text, reverse=True)
        of_schedules = [self._schedule(one) for one in schedules]
        return {
            "runs": rows,
            "sweeps": _table("Sweeps", _SWEEP_HEADER, of_sweeps, "/sweep/{}"),
            "schedules": _table("Schedules", _SCHEDULE_HEADER, of_schedules, "/run/{}/"),
            "num_sweeps": len(sweeps),
            "num_schedules": len(schedules),
        }

    def _run(self, path: Path) -> Row | None:
        run, folder = RunDirectory(path), os.fspath(path)
        # Texts: paths that are joined take longer than the looks at the files.
        files = [folder, *(f"{folder}/{name}" for name in _RECORDS)]
        row = self._remembered(path, files, lambda: _read_row(run))
        if row is None or row["state"] not in LIVE_STATES:
            return row
        view = read_run_view(run, asks_cluster=False)
        running = [
            f"{name}: {text}"
            for name, stage in view["stages"].items()
            if (text := progress_text(stage["progress"]))
        ]
        now = {"state": view["state"], "message": view["message"], "queued": view["queued"]}
        seconds = None
        if view["state"] == State.RUNNING:
            seconds = seconds_between(row["started_at"], utc_now())
        return _with_texts({**row, **now, "progress": "  ".join(running), "seconds": seconds})

    def _sweep(self, path: Path, points: Sequence[Row]) -> list[Cell]:
        try:
            sweep = self._remembered(path, (path / "sweep.json",), lambda: _read_sweep(path))
            others = sweep.states_without_runs
            is_driven = find_holder(sweep) is not None
        except (DamagedRecord, OSError) as damage:
            return [Cell(path.name), Cell("", mark="damaged", note=str(damage)), Cell(""), Cell("")]
        states = [
            State.WAITING if one["state"] == State.PENDING else one["state"] for one in points
        ]
        goes_on = is_driven or any(one["queued"] for one in points)
        completed = f"{states.count(State.COMPLETED)} of {sweep.num_points}"
        stopped = states.count(State.STOPPED_EARLY)
        return [
            Cell(path.name),
            Cell("", mark=state_of_sweep([*states, *others], goes_on=goes_on)),
            Cell(completed, True, note=f"{stopped} stopped early" if stopped else ""),
            Cell(short_moment(sweep.record.get("created_at")), True),
        ]

    def _schedule(self, directory: ScheduleDirectory) -> list[Cell]:
        path = directory.path
        files = (path / "schedule.json", path / "firings")
        return self._remembered(path, files, lambda: _read_schedule(directory))

    def _remembered(self, path: Path, files: Sequence[str | Path], read: Callable[[], _T]) -> _T:
        """Return what `read` does, or did when these files were as they are now."""
        identity = file_identities(files)
        known = self._known.get(path)
        if known is not None and known[0] == identity:
            found: _T = known[1]
            return found
        made = read()
        is_damaged = isinstance(made, dict) and made.get("damage")
        is_old = max(one[0] for one in identity) < time.time_ns() - _MIN_AGE_NANOSECONDS
        # What is damaged is looked at again: it may have been corrected in place.
        if is_old and not is_damaged:
            self._known[path] = (identity, made)
        return made


def encode_json(value: object) -> bytes:
    """Return a value as compact JSON; a number that is none is null."""
    try:
        return msgspec.json.encode(value)  # a tenth of the time of json.dumps
    except UnicodeEncodeError:  # half a character, of a file's name
        return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def file_identities(paths: Iterable[str | Path]) -> _Identity:
    """Return the time of change, size and inode of each file; zeros where it does not exist."""
    found = []
    for path in paths:
        try:
            status = os.stat(path)
        except OSError:
            found.append((0, 0, 0))
        else:
            found.append((status.st_ctime_ns, status.st_size, status.st_ino))
    return found


_SWEEP_HEADER = ("sweep", "state", "points completed", "created (UTC)")
_SCHEDULE_HEADER = ("schedule", "when", "pipeline", "last firing (UTC)", "result", "run")


def _table(
    caption: str, header: Sequence[str], rows: Sequence[Sequence[Cell]], address: str
) -> str:
    """A table as HTML; the first cell of a sweep and the last of a schedule are links."""
    column = 0 if caption == "Sweeps" else -1
    names = [row[column].text for row in rows]
    links = {name: address.format(quote(name)) for name in names if name}
    return render_table(Table(caption, header, rows, links=links)) if rows else ""


def _directories(folder: Path) -> list[Path]:
    """The directories in a folder; a name with a leading dot is still being made."""
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in entries if entry.name[0] != "." and entry.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [folder / name for name in names]


def _read_sweep(path: Path) -> SweepDirectory:
    """Return a sweep with its record, which it keeps."""
    sweep = SweepDirectory(path)
    _ = sweep.record
    return sweep


def _read_row(run: RunDirectory) -> Row | None:
    """A run's row by its own records; None where it was deleted meanwhile."""
    row: Row = {
        "run": run.id, "pipeline": run.id.rpartition("-")[0], "sequence": -1, "sweep": "",
        "state": "damaged", "message": "", "progress": "", "queued": False,
        "metrics": {}, "scores": {}, "created": "",
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
    row["damage"], row["created"] = " ".join(damaged), short_moment(row["created_at"])
    return _with_texts(row | {"is_deleted": find_run_deletion(run) is not None})


def _of_record(run: RunDirectory) -> Row:
    kept = ("sequence", "sweep", "tags", "overrides", "profile", "user", "created_at")
    return {key: run.record[key] for key in kept if run.record.get(key)}


def _of_state(run: RunDirectory) -> Row:
    state = run.read_state()
    started, ended = state.get("started_at"), state.get("ended_at")
    metrics = read_metrics(state["stages"])
    return {
        "state": state["state"],
        "message": (state.get("message") or "").partition("\n")[0],
        "started_at": started,
        "seconds": seconds_between(started, ended) if ended else None,
        "scores": {name: score(value) for name, value in metrics.items()},
        # JSON has neither NaN nor infinity, which a record that was edited by hand may have.
        "metrics": {name: one for name, one in metrics.items() if math.isfinite(one or 0.0)},
    }


def _of_notes(run: RunDirectory) -> Row:
    notes = read_notes(run)
    return {"note": notes.note, "labels": notes.labels, "edited_at": notes.edited_at}


def _with_texts(row: Row) -> Row:
    """A row with what changes while it runs as a report shows it."""
    return row | {"mark": state_mark(row["state"]), "took": duration(row["seconds"])}


def _read_schedule(directory: ScheduleDirectory) -> list[Cell]:
    try:
        schedule = directory.read()
    except (DamagedRecord, OSError) as damage:
        empty = [Cell("")] * 3
        return [Cell(directory.name), Cell("", mark="damaged", note=str(damage)), *empty, Cell("")]
    cells = [Cell(directory.name), Cell(schedule.when), Cell(schedule.pipeline)]
    if not (firings := directory.firings()):
        return [*cells, Cell("", True), Cell(""), Cell("")]
    last = firings[-1]
    run = last.run if last.has_started_run else ""
    result = Cell("" if run else last.told, mark=last.state)
    return [*cells, Cell(short_moment(last.due), True), result, Cell(run)]
