"""What becomes of stages whose jobs stand in a cluster's queue while their run has no orchestrator.

Reads the attempts' records and, of jobs that have not ended, what the cluster says. Writes nothing
of the run's.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from redco_flow.orchestrate.launch_record import LaunchRecord
from redco_flow.tracking.attempt import AttemptDirectory
from redco_flow.tracking.run_directory import RunDirectory
from redco_flow.tracking.shared_attempt import current_attempt
from redco_flow.tracking.states import State
from redco_flow.tracking.typed_records import unless_damaged

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
    """Whether the run's jobs were submitted at once, to go on without anybody."""
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
    """The attempt's job, where it has one."""
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
