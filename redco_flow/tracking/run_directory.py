"""One execution of a pipeline as a directory of small files; finding and listing them.

run.json never changes; state.json is written by the process that holds the lease; cancel.json
by anybody. Knows the files' places, not what the orchestrator does with them.
"""

from __future__ import annotations

import errno
import itertools
import os
import re
import secrets
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Required, TypedDict, cast

from redco_flow.errors import DamagedRecord, UsageError, some_of
from redco_flow.local_paths import PathIn
from redco_flow.records import write_json
from redco_flow.tracking.attempt import ENDED_RUN_STATES, AttemptDirectory, State
from redco_flow.tracking.process_identity import Clock, utc_now
from redco_flow.tracking.sequence_index import read_sequences
from redco_flow.tracking.typed_records import find_record, read_record
from redco_flow.tracking.workspace import Workspace, check_name, user_name

RUN_STATES = (State.PENDING, State.RUNNING, *ENDED_RUN_STATES)
LAST_RUN = ("last", "@last")  # what names the last run, in place of an id
_LETTERS = "abcdefghjkmnpqrstuvwxyz23456789"  # without those that are easily misread
_MAX_CANDIDATES = 10
_WHOLE_ID = re.compile(r"(?<![0-9a-f])[0-9a-f]{64}(?![0-9a-f])")
_REMEDIES = {
    "run.json": "Results and artifacts stand elsewhere: delete the run's directory or restore it.",
    "state.json": "Delete the file, and `redco-flow resume` takes the run up; results are reused.",
}


class RunRecord(TypedDict, total=False):
    """run.json."""

    id: str
    name: Required[str]
    sequence: Required[int]
    created_at: Required[str]
    argv: list[str]
    pipeline_path: str
    overrides: list[str]
    profile: str
    user: str
    host: str
    code: dict[str, Any]
    sweep: str
    tags: list[str]  # of the pipeline; absent up to 0.2.0
    version: str  # of redco-flow; absent before 0.2.0


class MadeByRecord(TypedDict):
    """The attempt that made a reused result."""

    run: str
    stage: str
    attempt: int


class StageRecord(TypedDict, total=False):
    """A stage in state.json; further keys are the last event's."""

    state: Required[str]
    kind: str  # absent up to 0.2.0
    reused: bool
    attempt: int | None
    ended_before: int  # the attempt that had ended before the run was (re)opened; 0: none
    seconds: float | None
    artifacts: dict[str, str]
    metrics: dict[str, float] | None
    message: str
    fingerprint: str | None
    made_by: MadeByRecord | None
    told_at: str


class StateRecord(TypedDict, total=False):
    """state.json."""

    state: Required[
        Literal["pending", "running", "completed", "failed", "cancelled", "stopped_early"]
    ]
    exit_code: int | None
    message: str
    started_at: str | None
    ended_at: str | None
    prefect_url: str | None
    stages: Required[dict[str, StageRecord]]


class PlannedStageRecord(TypedDict, total=False):
    """A stage in plan.json."""

    action: str
    reason: str
    fingerprint: str | None
    forced: bool


class PlanRecord(TypedDict):
    """plan.json."""

    stages: dict[str, PlannedStageRecord]


class OriginRecord(TypedDict):
    """The origin of a setting."""

    source: str
    line: int
    column: int


@dataclass(frozen=True)
class RunDirectory:
    """`<workspace>/runs/<name>-<shortid>/`."""

    path: Path

    def __fspath__(self) -> str:
        return os.fspath(self.path)

    @classmethod
    def create(
        cls,
        workspace: Workspace,
        name: str,
        *,
        argv: Sequence[str] = (),
        pipeline_path: str = "",
        overrides: Sequence[str] = (),
        profile: str = "local",
        code: Mapping[str, Any] | None = None,
        sweep: str = "",
        tags: Sequence[str] = (),
        version: str = "",
        run_id: str = "",
        clock: Clock = utc_now,
    ) -> RunDirectory:
        """Make a run's directory with run.json and a pending state; whole or not at all.

        Args:
            workspace: opened by `Workspace.open`.
            name: the pipeline's name.
            argv: the command line as typed.
            pipeline_path: the file as given.
            overrides: `key=value` as given.
            profile: the profile's name.
            code: commit, dirty, patch_digest (`code_digest.code_record`).
            sweep: the id of the sweep that the run is a point of.
            tags: the pipeline's.
            version: of redco-flow.
            run_id: of `new_run_id`; empty: one is drawn.
            clock: the time of day, for people.

        Raises:
            UsageError: `name` or `run_id` is not a name, or a run has this id.
            OSError: the disk is full or read-only; names the path.
        """
        check_name(name, "pipeline name")
        record = {
            "name": name,
            "sequence": workspace.next_sequence(),
            "created_at": clock(),
            "argv": list(argv),
            "pipeline_path": pipeline_path,
            "overrides": list(overrides),
            "profile": profile,
            "user": user_name(),
            "host": os.uname().nodename,
            "code": dict(code or {}),
            "sweep": sweep,
            "tags": list(tags),
            "version": version,
        }
        while True:
            drawn = check_run_id(run_id) if run_id else new_run_id(name)
            path = _appear(workspace.runs / drawn, {"id": drawn, **record})
            if path is not None:
                return cls(path)
            if run_id:
                raise UsageError(f"there is a run {run_id} already: `redco-flow status {run_id}`.")

    @property
    def id(self) -> str:
        """`<name>-<shortid>`."""
        return self.path.name

    @cached_property
    def record(self) -> dict[str, Any]:
        """run.json, which never changes; read once.

        Raises:
            DamagedRecord: it is damaged or gone.
        """
        path, remedy = self.path / "run.json", _REMEDIES["run.json"]
        try:
            return cast("dict[str, Any]", read_record(path, RunRecord, remedy=remedy))
        except OSError as error:
            raise DamagedRecord(path, "it is gone", remedy) from error

    @property
    def sequence(self) -> int:
        """The run's place in the workspace's order of events.

        Raises:
            DamagedRecord: run.json is damaged.
        """
        return int(self.record["sequence"])

    resolved_path = PathIn("resolved.yaml")
    """Path of the complete configuration, defaults included."""
    origins_path = PathIn("origins.json")
    """Path of the origin of each leaf of resolved.yaml."""
    plan_path = PathIn("plan.json")
    """Each stage's fingerprint, action and reason."""
    fits_path = PathIn("fits.json")
    """Path of the predictions of `plan --fit` for the trainings, where there are any."""
    patch_path = PathIn("code.patch")
    """The code's difference from its commit, where there is one."""
    lease_path = PathIn("lease.json")
    """Path of the lease of the process that drives the run."""
    journal_path = PathIn("journal.jsonl")
    """Path of the journal of events."""
    state_path = PathIn("state.json")
    """Path of the run's state."""
    cancel_path = PathIn("cancel.json")
    """A request to stop."""
    log_path = PathIn("orchestrator.log")
    """The orchestrator's output."""
    report_path = PathIn("report.html")
    """The run's static page."""

    def read_state(self) -> dict[str, Any]:
        """Return state.json; a run without one is pending.

        Raises:
            DamagedRecord: it is damaged.
        """
        record = find_record(self.state_path, StateRecord, remedy=_REMEDIES["state.json"])
        return _pending_state() if record is None else cast("dict[str, Any]", record)

    def write_state(self, state: Mapping[str, Any]) -> None:
        """Replace state.json; only the lease's holder may.

        Raises:
            ValueError: `state["state"]` is none of RUN_STATES.
            OSError: the disk is full or read-only; the old state is untouched.
        """
        if state.get("state") not in RUN_STATES:
            raise ValueError(f"run state {state.get('state')!r} is none of {', '.join(RUN_STATES)}")
        write_json(self.state_path, state)

    def read_plan(self) -> dict[str, Any]:
        """Return plan.json; empty where the run was not planned yet.

        Raises:
            DamagedRecord: it is damaged.
        """
        return cast("dict[str, Any]", find_record(self.plan_path, PlanRecord) or {})

    def read_pinned_artifacts(self) -> set[str]:
        """Return the ids of the artifacts that its pipeline names, also by an alias."""
        try:
            return set(_WHOLE_ID.findall(self.resolved_path.read_text(encoding="utf-8")))
        except FileNotFoundError:  # the run is just being made
            return set()

    def read_origins(self) -> dict[str, Any]:
        """Return origins.json; empty where there is none.

        Raises:
            DamagedRecord: it is damaged.
        """
        return find_record(self.origins_path, dict[str, OriginRecord]) or {}

    def attempt(self, stage: str, number: int) -> AttemptDirectory:
        """Return one attempt's directory, which need not exist."""
        return AttemptDirectory(self._attempts(stage) / str(number))

    def attempts(self, stage: str) -> list[AttemptDirectory]:
        """Return a stage's attempts, first to last."""
        try:
            names = os.listdir(self._attempts(stage))
            numbers = sorted(int(name) for name in names if name.isdecimal())
        except FileNotFoundError:
            return []
        return [self.attempt(stage, number) for number in numbers]

    def latest_attempt(self, stage: str) -> AttemptDirectory | None:
        """Return a stage's last attempt, or None before the first."""
        attempts = self.attempts(stage)
        return attempts[-1] if attempts else None

    def new_attempt(self, stage: str) -> AttemptDirectory:
        """Make the directory of a stage's next attempt, with its logs/.

        Raises:
            UsageError: `stage` is not a name.
        """
        check_name(stage, "stage name")
        self._attempts(stage).mkdir(parents=True, exist_ok=True)
        latest = self.latest_attempt(stage)
        attempt = self.attempt(stage, latest.number + 1 if latest else 1)
        attempt.path.mkdir()
        attempt.logs.mkdir()
        return attempt

    def request_cancel(self, reason: str = "") -> None:
        """Ask the run's orchestrator to stop it; any process may, more than once."""
        record = {"time": utc_now(), "by": f"{user_name()}@{os.uname().nodename}"}
        write_json(self.cancel_path, {**record, "reason": reason})

    def cancel_requested(self) -> bool:
        """Say whether the run was asked to stop."""
        return self.cancel_path.exists()

    def clear_cancel(self) -> None:
        """Forget the request: the run is resumed."""
        self.cancel_path.unlink(missing_ok=True)

    def _attempts(self, stage: str) -> Path:
        return self.path / "stages" / stage / "attempts"


def list_runs(workspace: Workspace) -> list[RunDirectory]:
    """Return all runs, newest first by sequence number; reads the run.json of new ones alone.

    Runs whose run.json is damaged come last: it is not known when they were.
    """
    runs = {name: RunDirectory(workspace.runs / name) for name in _run_ids(workspace)}
    sequences = read_sequences(
        workspace,
        workspace.runs,
        "run.json",
        lambda name: _known_sequence(runs[name]) if name in runs else None,
    )
    newest = sorted(runs, key=lambda name: (sequences.get(name, -1), name), reverse=True)
    return [runs[name] for name in newest]


def list_damaged(runs: Sequence[RunDirectory]) -> list[RunDirectory]:
    """Return those of whom nothing is known, for their run.json is damaged.

    Args:
        runs: as `list_runs` has them: the damaged ones are the last.
    """
    return list(itertools.takewhile(is_damaged, reversed(runs)))[::-1]


def find_run(workspace: Workspace, text: str) -> RunDirectory:
    """Return the run that `text` names: an id, its beginning, a short id, `last` or a path.

    Raises:
        UsageError: none or several fit; lists the candidates.
    """
    ids = _run_ids(workspace)
    if text in ids:
        return RunDirectory(workspace.runs / text)
    if os.sep in text and (Path(text) / "run.json").is_file():
        return RunDirectory(Path(text).absolute())
    if not ids:
        raise UsageError(
            f"no runs in {workspace.root}; start one with `redco-flow run PIPELINE`, or name "
            f"another workspace."
        )
    if text in LAST_RUN:
        return list_runs(workspace)[0]
    fitting = [
        run for run in ids if run.startswith(text) or run.rpartition("-")[2].startswith(text)
    ]
    if text and len(fitting) == 1:
        return RunDirectory(workspace.runs / fitting[0])
    if text and fitting:
        listed = some_of(fitting, _MAX_CANDIDATES)
        raise UsageError(f"{text!r} fits {len(fitting)} runs: {listed}. Add letters.")
    name, _, stage = text.partition("/")
    if stage and name in (*ids, *LAST_RUN):
        raise UsageError(
            f"{text!r} names a stage, and a run is expected: `redco-flow status {name}` shows its "
            f"stages, `redco-flow logs {text}` the log of this one."
        )
    raise UsageError(f"no run {text!r} in {workspace.root}; {_nearest(text, ids)}")


def is_damaged(run: RunDirectory) -> bool:
    """Say whether nothing is known of a run, for its run.json is damaged."""
    return _known_sequence(run) < 0


def _known_sequence(run: RunDirectory) -> int:
    """The run's sequence number; -1 where it cannot be known."""
    try:
        return run.sequence
    except DamagedRecord:
        return -1


def _run_ids(workspace: Workspace) -> list[str]:
    """Directory names; a name with a leading dot is a run still being made."""
    try:
        with os.scandir(workspace.runs) as entries:
            return sorted(
                entry.name for entry in entries if entry.name[0] != "." and entry.is_dir()
            )
    except FileNotFoundError:
        return []


def _appear(path: Path, record: dict[str, Any]) -> Path | None:
    """Make the directory under its name in one rename; None if the name is taken."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    temporary.mkdir()
    try:
        write_json(temporary / "run.json", record)
        write_json(temporary / "state.json", _pending_state())
        temporary.rename(path)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            return None
        raise
    return path


def check_run_id(text: str) -> str:
    """Return `text` if a new run can have it as its id.

    Raises:
        UsageError: it is not a name, or names the last run.
    """
    if text == "last":
        raise UsageError("run's id 'last' would name the last run, too: give another.")
    return check_name(text, "run's id")


def new_run_id(name: str) -> str:
    """Return an id that a run of a pipeline can have: `<name>-<shortid>`."""
    return f"{name}-{''.join(secrets.choice(_LETTERS) for _ in range(6))}"


def _pending_state() -> dict[str, Any]:
    return {"state": State.PENDING, "exit_code": None, "message": "", "stages": {}}


def _nearest(text: str, ids: Sequence[str]) -> str:
    import difflib

    near = difflib.get_close_matches(text, ids, n=3, cutoff=0.3)
    if near:
        return f"did you mean {some_of(near, _MAX_CANDIDATES)}? `redco-flow ls` lists all runs."
    return f"there are last, {some_of(ids, _MAX_CANDIDATES)}"
