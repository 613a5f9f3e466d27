"""Read a run's state from its files, for `status`, `attach` and `ls`.

One plain dict, the same for `--json`, the live table and quiet lines. Reads only.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from redco_flow.errors import DamagedRecord
from redco_flow.launch.disk_reserve import full_disk
from redco_flow.orchestrate.run.launcher import launcher_status
from redco_flow.orchestrate.run.state import LaunchRecord
from redco_flow.report.numbers import seconds_between
from redco_flow.tracking.aliases import AliasStore
from redco_flow.tracking.artifacts import ArtifactStore
from redco_flow.tracking.attempt import LASTING, AttemptDirectory, State
from redco_flow.tracking.damage import find_damaged_records
from redco_flow.tracking.deletions import deletion_text, find_deletion, find_run_deletion
from redco_flow.tracking.locks import find_holder
from redco_flow.tracking.notes import RunNotes, read_notes
from redco_flow.tracking.planned_fits import compare_fits
from redco_flow.tracking.process_identity import utc_now
from redco_flow.tracking.run_directory import RunDirectory
from redco_flow.tracking.run_metrics import read_metrics
from redco_flow.tracking.sweep_directory import current_attempt
from redco_flow.tracking.typed_records import unless_damaged
from redco_flow.tracking.workspace import Workspace

if TYPE_CHECKING:
    from redco_flow.launch.executor import CallJob, JobStatus


_LEFT_STATES = (State.PENDING, State.WAITING, State.RUNNING)
_WORDS: dict[str, State] = {
    State.PENDING: State.WAITING,
    State.RUNNING: State.RUNNING,
    State.COMPLETED: State.COMPLETED,
    State.CANCELLED: State.CANCELLED,
}


def has_queued_jobs(run: RunDirectory) -> bool:
    """Whether the run's jobs were all submitted at once (`--ahead`), so they need no launcher."""
    record = unless_damaged(lambda: LaunchRecord.read(run))
    return record is not None and record.ahead


def queued_stages(run: RunDirectory, stages: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the stages' entries of state.json as their jobs are now.

    Of a stage that had not ended there, `job_state` says what its job is at: PENDING and
    RUNNING are those that go on.
    """
    left = {name: entry for name, entry in stages.items() if entry["state"] in _LEFT_STATES}
    attempts = {name: current_attempt(run, name) for name in left}
    jobs = {name: _job(attempt) for name, attempt in attempts.items() if attempt is not None}
    # All of them before the first is asked: one answer of the cluster's then does for all.
    known = {name: _entry(run, job) for name, job in jobs.items() if job is not None}
    return {name: {**entry, **known.get(name, {})} for name, entry in stages.items()}


def _job(attempt: AttemptDirectory) -> CallJob | None:
    return _reattach(attempt) if attempt.job_path.exists() else None


@functools.cache
def _reattach(attempt: AttemptDirectory) -> CallJob:
    """One job for each attempt: who is asked again and again asks the cluster seldom."""
    # Imported here: most runs that are looked at have no such job.
    from redco_flow.launch.executor import reattach

    return reattach(attempt.read_job() or {})


def _entry(run: RunDirectory, job: CallJob) -> dict[str, Any]:
    status, attempt = job.status(), job.attempt
    if not attempt.path.is_relative_to(run.path):
        return _shared_entry(attempt, status)
    entry: dict[str, Any] = {
        "state": _WORDS.get(status.state, State.FAILED),
        "job_state": status.state,
        "attempt": attempt.number,
        "message": status.message,
        "told_at": "",
    }
    result = attempt.read_result()
    if status.state == State.COMPLETED and result is not None:
        made = {"artifacts": result["outputs"], "metrics": result["metrics"]}
        entry |= {**made, "seconds": result["seconds"], "message": ""}
    return entry


def _shared_entry(attempt: AttemptDirectory, status: JobStatus) -> dict[str, Any]:
    """Of a stage whose result another run makes: this run only waits for it."""
    maker = (attempt.read_call() or {}).get("run")
    result = attempt.read_result()
    if result is not None:
        made = {"artifacts": result["outputs"], "metrics": result["metrics"], "seconds": 0.0}
        return {"state": State.COMPLETED, "reused": True, "message": f"made by {maker}", **made}
    return {
        "state": State.WAITING,
        "job_state": status.state if status.is_finished else State.PENDING,
        "message": f"made by run {maker}, whose job {status.message}",
    }


LIVE_STATES = (State.PENDING, State.RUNNING)
_START_GRACE_SECONDS = 60.0


def _recorded_stages(run: RunDirectory, stages: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return what `queued_stages` does, as far as the records say it: the cluster is not asked."""
    found = {}
    for name, entry in stages.items():
        attempt = current_attempt(run, name) if entry["state"] in _LEFT_STATES else None
        if attempt is not None and attempt.cause is None:
            progress = unless_damaged(attempt.read_progress)
            state = State.PENDING if progress is None else State.RUNNING
            message = f"{state} by its records; `redco-flow status` asks the cluster"
            entry = {**entry, "job_state": state, "message": message}
        found[name] = entry
    return found


def read_run_view(run: RunDirectory, *, asks_cluster: bool = True) -> dict[str, Any]:
    """Return the run's state with each stage's progress and, of a finished one, its metrics.

    A run whose state says that it runs, but whose orchestrating process is gone, is
    INTERRUPTED: its jobs may live, and `resume` continues it. One whose jobs need no such process
    is PENDING while they wait in the cluster's queue and RUNNING while one of them runs. One
    whose own records are damaged is "damaged".

    Args:
        asks_cluster: False: the records alone say how far jobs without such a process are.
    """
    try:
        return _view_of_state(run, asks_cluster=asks_cluster)
    except DamagedRecord as damage:
        return _view_of_damaged(run, damage)


def read_checked_view(run: RunDirectory, *, with_lines: bool) -> dict[str, Any]:
    """Return the run's view with what people added, its damaged records and its deletion.

    Args:
        with_lines: as of `find_damaged_records`.
    """
    found = find_damaged_records(run, with_lines=with_lines)
    deletion = find_run_deletion(run)
    notes = unless_damaged(lambda: read_notes(run)) or RunNotes()
    return {
        **read_run_view(run),
        "tags": (unless_damaged(lambda: run.record) or {}).get("tags", []),
        "labels": notes.labels,
        "note": notes.note,
        "damaged": [str(damage) for damage in found],
        "deleted": deletion_text(deletion) if deletion else "",
    }


def with_goodput(run: RunDirectory, view: dict[str, Any]) -> dict[str, Any]:
    """Return a run's view with how each training spent its time, where its records tell."""
    # Imported here: who follows a run does not pay for it.
    from redco_flow.tracking.goodput import find_goodput

    stages = {}
    for name, stage in view["stages"].items():
        found = find_goodput(run, name)
        stages[name] = {**stage, "goodput": None if found is None else found.to_json()}
    return {**view, "stages": stages}


def with_fits(run: RunDirectory, view: dict[str, Any]) -> dict[str, Any]:
    """Return a run's view with the prediction for each training, next to what it measured."""
    fits = compare_fits(run)
    stages = {
        name: {**stage, "fit": fits[name].to_json() if name in fits else None}
        for name, stage in view["stages"].items()
    }
    return {**view, "stages": stages}


def with_aliases(run: RunDirectory, view: dict[str, Any]) -> dict[str, Any]:
    """Return a run's view with the aliases that name what its stages made, and its deletions."""
    workspace = Workspace(run.path.parents[1])
    named, store = AliasStore(workspace).by_artifact(), ArtifactStore(workspace)
    stages = {}
    for name, stage in view["stages"].items():
        found = {key: named[id] for key, id in stage["artifacts"].items() if id in named}
        aliases = {key: [str(alias.name) for alias in those] for key, those in found.items()}
        artifacts = {key: store.find(id) for key, id in stage["artifacts"].items()}
        deletions = {key: find_deletion(one) for key, one in artifacts.items() if one is not None}
        deleted = {key: deletion_text(one) for key, one in deletions.items() if one is not None}
        stages[name] = {**stage, "aliases": aliases, "deleted": deleted}
    return {**view, "stages": stages}


def _view_of_damaged(run: RunDirectory, damage: DamagedRecord) -> dict[str, Any]:
    record = unless_damaged(lambda: run.record) or {}
    return {
        "run": run.id,
        "state": "damaged",
        "queued": False,
        "launcher": None,
        "exit_code": None,
        "message": str(damage),
        "created_at": record.get("created_at"),
        "sweep": record.get("sweep", ""),
        "seconds": None,
        "prefect_url": None,
        "report": str(run.report_path) if run.report_path.is_file() else None,
        "stages": {},
        "metrics": {},
    }


def _view_of_state(run: RunDirectory, *, asks_cluster: bool) -> dict[str, Any]:
    state = run.read_state()
    stages = state.get("stages", {})
    names = list(stages) or list(run.read_plan().get("stages", {}))
    shown, message = state["state"], state.get("message") or ""
    holder = find_holder(run) if shown in LIVE_STATES else None  # else its lease may be damaged
    is_queued = False
    is_left = shown in LIVE_STATES and holder is None
    launcher = launcher_status(run, asks_cluster=asks_cluster) if is_left else None
    if launcher is not None:
        is_left = launcher.has_ended
        hint = f"; {run.log_path} may say why" if is_left else ""
        message = f"its launcher, {launcher.name}, {launcher.message}{hint}"
    if is_left and shown == State.RUNNING and has_queued_jobs(run):
        stages = (queued_stages if asks_cluster else _recorded_stages)(run, stages)
        going_on = {n: s for n, s in stages.items() if s.get("job_state") in LIVE_STATES}
        is_queued = bool(going_on)
        shown, message = _summarize(going_on)
    elif is_left and (launcher is not None or not _may_be_starting(run)):
        shown = State.INTERRUPTED
    if shown == State.INTERRUPTED:
        message = message or full_disk(run.path)
    return {
        "run": run.id,
        "state": shown,
        "queued": is_queued,
        "launcher": f"job {holder.job} on {holder.holder.host}" if holder and holder.job else None,
        "exit_code": state.get("exit_code"),
        "message": message,
        "created_at": run.record.get("created_at"),
        "sweep": run.record.get("sweep", ""),
        "seconds": seconds_between(state.get("started_at"), state.get("ended_at") or utc_now()),
        "prefect_url": state.get("prefect_url"),
        "report": str(run.report_path) if run.report_path.is_file() else None,
        "stages": {name: _stage_view(run, name, stages.get(name, {})) for name in names},
        "metrics": read_metrics(stages),
    }


def _summarize(going_on: dict[str, Any]) -> tuple[str, str]:
    """The state and message of a run without an orchestrator, by its stages whose jobs go on."""
    if not going_on:
        return State.INTERRUPTED, ""
    is_at_work = any(stage["job_state"] == State.RUNNING for stage in going_on.values())
    name, first = next(iter(going_on.items()))
    return State.RUNNING if is_at_work else State.PENDING, f"{name}: {first['message']}"


def _stage_view(run: RunDirectory, name: str, state: dict[str, Any]) -> dict[str, Any]:
    view = {
        "state": state.get("state", State.PENDING),
        "reused": bool(state.get("reused")),
        "attempt": state.get("attempt"),
        "seconds": state.get("seconds"),
        "artifacts": state.get("artifacts", {}),
        "message": state.get("message") or "",
        "progress": None,
        **dict.fromkeys(LASTING),
        "profile": None,
    }
    attempt = run.attempt(name, view["attempt"]) if view["attempt"] else None
    progress = unless_damaged(attempt.read_progress) if attempt else None
    view |= {key: (progress or {}).get(key) for key in LASTING}
    # One that a retry came after is none the worse.
    profiles = [one.profile_path for one in run.attempts(name) if one.profile_path.is_dir()]
    view["profile"] = str(profiles[-1]) if profiles else None
    if view["state"] == State.RUNNING:
        view["progress"] = progress
        # The cluster is asked seldom: a heartbeat since then knows better than its answer.
        if progress and progress.get("time", "") > state.get("told_at", ""):
            view["message"] = ""
        if view["message"]:  # of a running stage: why its job is not at work
            view["state"] = State.WAITING
    return view


def _may_be_starting(run: RunDirectory) -> bool:
    """Whether the process that is to drive the run may still be on its way."""
    if run.lease_path.exists():
        return False
    age = seconds_between(run.record.get("created_at"), utc_now())
    return age is not None and age < _START_GRACE_SECONDS
