"""One sweep as a directory: which runs are its trials. Their states are in the runs themselves.

`<workspace>/sweeps/<name>-sweep-<shortid>/`: sweep.json, written once; lease.json and launcher.log
of the process that starts the runs, early_stopping.jsonl with its decisions, points.jsonl with the
points that a sampler has given it, problem.json while none can be made; cancel.json by the process
that asks for the end; jobs/<n>/ with script, id and output of a job that computes several points.
A stage that another run of the sweep computes has that attempt's name in
`shared.json`.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NotRequired, Required, TypedDict, TypeVar, cast

from redco_flow.errors import UsageError
from redco_flow.local_paths import PathIn
from redco_flow.records import append_json_line, write_json
from redco_flow.tracking.attempt import AttemptDirectory, State
from redco_flow.tracking.process_identity import utc_now
from redco_flow.tracking.run_directory import LAST_RUN, RunDirectory, find_run
from redco_flow.tracking.typed_records import find_record, read_record, read_record_lines
from redco_flow.tracking.workspace import Workspace, check_name

_LineT = TypeVar("_LineT")
_MARK = "-sweep-"
_LETTERS = "abcdefghjkmnpqrstuvwxyz23456789"


_REMEDY = "Its runs stand by themselves; delete the sweep's directory or restore it."


class PointRecord(TypedDict):
    """One point in sweep.json."""

    run: str
    overrides: list[str]
    packed: NotRequired[list[str]]


class SweepRecord(TypedDict, total=False):
    """sweep.json."""

    id: Required[str]
    created_at: str
    argv: list[str]
    max_parallel: Required[int]
    ahead: bool
    points_per_job: int | None  # absent up to 0.2.0
    early_stopping: dict[str, Any] | None
    search: dict[str, Any] | None  # absent up to 0.2.0
    points: Required[list[PointRecord]]


class ProblemRecord(TypedDict):
    """problem.json."""

    time: str
    message: str


@dataclass(frozen=True)
class SweepPoint:
    """One point: its run, and the settings by which it differs from the others.

    Args:
        packed: its stages that run in a packed job.
    """

    run: str
    overrides: list[str]
    packed: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class RungDecision:
    """A line of early_stopping.jsonl: whether a point's training continues after a rung.

    Args:
        time: of the value's record.
        run: the point's.
        attempt: of the training; 0 where the point reuses a result.
        rung: 0 is the first.
        step: at which the value was measured.
        value: the metric; None where it was not a finite number.
        cutoff: the worst value at this rung with which a training continues.
        is_stopped: whether the training is to end.
        reason: for people.
    """

    time: str
    run: str
    attempt: int
    rung: int
    step: int
    value: float | None
    cutoff: float | None
    is_stopped: bool
    reason: str


@dataclass(frozen=True)
class SampledPoint:
    """A line of points.jsonl: a point that a sampler has given; the last line of a number counts.

    Args:
        number: 0 is the first.
        run: the point's; "" where it repeats an earlier one.
        state: `asked` before the run is written, and `made` after that; `refused` where the
            settings cannot be a run; `repeated` where an earlier point has the same values.
        message: why it is refused.
        outcome: of its run, for the sampler; "" until it has ended, and of a failed one.
        score, step: the metric's last value and its step, where there is one.
    """

    number: int
    run: str
    overrides: list[str]
    state: Literal["asked", "made", "refused", "repeated"]
    message: str = ""
    outcome: Literal["", "complete", "pruned"] = ""
    score: float | None = None
    step: int = 0


@dataclass(frozen=True)
class SweepDirectory:
    """`<workspace>/sweeps/<name>-sweep-<shortid>/`."""

    path: Path

    def __fspath__(self) -> str:
        return os.fspath(self.path)

    @classmethod
    def create(cls, workspace: Workspace, name: str) -> SweepDirectory:
        """Make the directory of a sweep over a pipeline; it is one once `write` is done.

        Raises:
            UsageError: `name` is not a name.
            OSError: the disk is full or read-only; names the path.
        """
        check_name(name, "pipeline name")
        shortid = "".join(secrets.choice(_LETTERS) for _ in range(6))
        path = _folder(workspace) / f"{name}{_MARK}{shortid}"
        path.mkdir(parents=True)
        return cls(path)

    @classmethod
    def of_point(cls, run: RunDirectory) -> SweepDirectory | None:
        """Return the directory of the sweep that a run is a point of; None for other runs.

        Raises:
            DamagedRecord: the run's record is damaged.
        """
        name = run.record.get("sweep")
        return cls(run.path.parents[1] / "sweeps" / name) if name else None

    def write(
        self,
        points: Iterable[SweepPoint],
        *,
        max_parallel: int,
        argv: Sequence[str],
        ahead: bool = False,
        points_per_job: int | None = None,
        early_stopping: Mapping[str, Any] | None = None,
        search: Mapping[str, Any] | None = None,
    ) -> None:
        """Write sweep.json.

        Args:
            points: none where a sampler gives them.
            ahead: queue the jobs of all points at once.
            points_per_job: points that one job computes; None: each has jobs of its own.
            early_stopping: how trainings are stopped early, if they are.
            search: settings of the sampler that chooses the points, if one does.
        """
        record = {
            "id": self.id,
            "created_at": utc_now(),
            "argv": list(argv),
            "max_parallel": max_parallel,
            "ahead": ahead,
            "points_per_job": points_per_job,
            "early_stopping": dict(early_stopping) if early_stopping else None,
            "search": dict(search) if search else None,
            "points": [asdict(point) for point in points],
        }
        write_json(self._record_path, record)

    @property
    def id(self) -> str:
        """`<name>-sweep-<shortid>`."""
        return self.path.name

    @cached_property
    def record(self) -> dict[str, Any]:
        """sweep.json, which never changes."""
        return cast("dict[str, Any]", read_record(self._record_path, SweepRecord, remedy=_REMEDY))

    @property
    def is_ahead(self) -> bool:
        """Whether to queue the jobs of all points at once."""
        return bool(self.record.get("ahead"))

    @property
    def points_per_job(self) -> int | None:
        """The number of points that one job computes; None where each has jobs of its own."""
        return self.record.get("points_per_job")

    @property
    def search(self) -> dict[str, Any] | None:
        """Settings of the sampler that chooses the points; None where a sweep began with all."""
        return self.record.get("search")

    @property
    def points(self) -> list[SweepPoint]:
        """The sweep's points, in the order of the grid, or as a sampler gave them so far."""
        if self.search is None:
            listed = self.record["points"]
            return [
                SweepPoint(one["run"], one["overrides"], one.get("packed", [])) for one in listed
            ]
        sampled = self.read_sampled_points()
        return [SweepPoint(one.run, one.overrides) for one in sampled if one.state == "made"]

    @property
    def num_points(self) -> int:
        """The number of points, those to be given by a sampler included, repeated ones not."""
        if self.search is None:
            return len(self.record["points"])
        repeated = [one for one in self.read_sampled_points() if one.state == "repeated"]
        return int(self.search["number"]) - len(repeated)

    @property
    def num_open(self) -> int:
        """The number of points that a sampler is still to give."""
        if self.search is None:
            return 0
        return self._num_open(self.read_sampled_points())

    @property
    def states_without_runs(self) -> list[State]:
        """The states of points that have no run: those refused, and those to be made."""
        if self.search is None:
            return []
        sampled = self.read_sampled_points()
        refused = sum(one.state == "refused" for one in sampled)
        still = State.CANCELLED if self.cancel_path.exists() else State.WAITING
        return [State.FAILED] * refused + [still] * self._num_open(sampled)

    def _num_open(self, sampled: Sequence[SampledPoint]) -> int:
        return int(self.record["search"]["number"]) - sum(one.state != "asked" for one in sampled)

    def read_sampled_points(self) -> list[SampledPoint]:
        """Return the points that a sampler has given, in their order.

        Raises:
            DamagedRecord: a line is damaged; names it.
        """
        lines = _read_lines(self._sampled_path, SampledPoint)
        return list({one.number: one for one in lines}.values())

    def add_sampled_point(self, point: SampledPoint) -> None:
        """Record a point that a sampler has given; only the holder of the sweep's lease may.

        Raises:
            OSError: the disk is full or read-only; names the path. The file is as it was.
        """
        _append(self._sampled_path, point)

    @property
    def problem(self) -> str:
        """The reason for which the next point could not be made; "" where there is none.

        Raises:
            DamagedRecord: the record is damaged.
        """
        record = find_record(self._problem_path, ProblemRecord)
        return record["message"] if record is not None else ""

    def write_problem(self, message: str) -> None:
        """Record why the next point could not be made.

        Raises:
            OSError: the disk is full or read-only; names the path.
        """
        write_json(self._problem_path, {"time": utc_now(), "message": message})

    def clear_problem(self) -> None:
        """Remove what `write_problem` has recorded."""
        self._problem_path.unlink(missing_ok=True)

    def run_of(self, point: SweepPoint) -> RunDirectory:
        """Return a point's run."""
        return RunDirectory(self.path.parent.parent / "runs" / point.run)

    @property
    def runs(self) -> list[RunDirectory]:
        """The points' runs, in the order of the grid."""
        return [self.run_of(point) for point in self.points]

    log_path = PathIn("launcher.log")
    """Path of the log of the process that starts the runs."""
    report_path = PathIn("report.html")
    """The sweep's page."""
    cancel_path = PathIn("cancel.json")
    """There once the sweep was asked to stop."""

    @property
    def jobs_path(self) -> Path:
        """The folder of the packed jobs' own files, in a directory each."""
        return self.path / "jobs"

    def read_decisions(self) -> list[RungDecision]:
        """Return the decisions on early stopping, in their order; none where there are none.

        Raises:
            DamagedRecord: a line is damaged; names it.
        """
        return _read_lines(self._decisions_path, RungDecision)

    def add_decision(self, decision: RungDecision) -> None:
        """Record a decision; only the process that holds the sweep's lease may.

        Raises:
            OSError: the disk is full or read-only; names the path. The file is as it was.
        """
        _append(self._decisions_path, decision)

    _sampled_path = PathIn("points.jsonl")
    _problem_path = PathIn("problem.json")
    _decisions_path = PathIn("early_stopping.jsonl")
    _record_path = PathIn("sweep.json")


def _read_lines(path: Path, record_type: type[_LineT]) -> list[_LineT]:
    """Return the records of a file with one a line; none where there is no file."""
    return list(read_record_lines(path, record_type)) if path.exists() else []


def _append(path: Path, record: RungDecision | SampledPoint) -> None:
    size = path.stat().st_size if path.exists() else 0
    try:
        append_json_line(path, asdict(record))
    except OSError:
        with suppress(OSError):
            os.truncate(path, size)
        raise


def find_sweep(workspace: Workspace, text: str) -> SweepDirectory | None:
    """Return the sweep that `text` names by its id, the id's beginning or end; None if none is.

    A beginning that runs have, too, means them, unless it goes on into the sweep's own part.

    Raises:
        UsageError: several fit.
    """
    if text in LAST_RUN:
        return None
    names = [path.parent.name for path in _folder(workspace).glob("*/sweep.json")]
    if text in names:
        return SweepDirectory(_folder(workspace) / text)
    fitting = [
        name
        for name in names
        if (_MARK in text and name.startswith(text)) or text == name.rpartition("-")[2]
    ]
    if not fitting and text and not _begins_a_run(workspace, text):
        fitting = [
            name
            for name in names
            if name.startswith(text) or name.rpartition("-")[2].startswith(text)
        ]
    if len(fitting) > 1:
        raise UsageError(f"{text!r} fits {len(fitting)} sweeps: {', '.join(sorted(fitting))}.")
    return SweepDirectory(_folder(workspace) / fitting[0]) if fitting else None


def find_single_run(workspace: Workspace, text: str) -> RunDirectory:
    """As `find_run`, for a verb that takes no sweep.

    Raises:
        UsageError: as `find_run`; where a sweep is named, says so.
    """
    try:
        return find_run(workspace, text)
    except UsageError:
        if (sweep := find_sweep(workspace, text)) is None:
            raise
    raise UsageError(
        f"{sweep.id} is a sweep; name one of its runs, which `redco-flow status {sweep.id}` lists."
    )


def _begins_a_run(workspace: Workspace, text: str) -> bool:
    try:
        return any(name.startswith(text) for name in os.listdir(workspace.runs))
    except FileNotFoundError:
        return False


def _folder(workspace: Workspace) -> Path:
    return workspace.root / "sweeps"


def find_early_stop(attempt: AttemptDirectory) -> RungDecision | None:
    """Return the decision by which its sweep stopped an attempt; None where there is none.

    Raises:
        DamagedRecord: the run's record or the sweep's decisions are damaged.
    """
    run = RunDirectory(attempt.whole.path.parents[3])
    directory = SweepDirectory.of_point(run)
    if directory is None:
        return None
    settings = directory.record.get("early_stopping")
    if not settings or attempt.whole.stage != settings["stage"]:
        return None
    decisions = directory.read_decisions()
    stops = (one for one in decisions if one.is_stopped and one.run == run.id)
    return next((one for one in stops if one.attempt == attempt.number), None)


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
    name = os.path.relpath(attempt.path, run.path.parents[1])  # the workspace may be moved
    write_json(path, {"attempt": name, "own_attempts": len(run.attempts(stage))})


def read_shared_attempt(run: RunDirectory, stage: str) -> AttemptDirectory | None:
    """Return the attempt of another run that makes the stage's result; None where none was noted.

    None, too, once the run has made an attempt of its own after that.

    Raises:
        DamagedRecord: the note is damaged.
    """
    record = find_record(_path(run, stage), SharedRecord)
    if record is None or len(run.attempts(stage)) > record["own_attempts"]:
        return None
    return AttemptDirectory(run.path.parents[1] / record["attempt"])


def current_attempt(run: RunDirectory, stage: str) -> AttemptDirectory | None:
    """Return the attempt, the run's own or another's, from which the stage's result is to come."""
    return read_shared_attempt(run, stage) or run.latest_attempt(stage)


def _path(run: RunDirectory, stage: str) -> Path:
    return run.path / "stages" / stage / "shared.json"
