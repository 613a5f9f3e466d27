"""Translate Slurm's job states and reasons into a job's status, and into the cause of its end."""

from __future__ import annotations

import re

from redco_flow.launch.endings import ClusterWord
from redco_flow.launch.job import JobStatus
from redco_flow.launch.slurm.messages import why_it_never_starts
from redco_flow.launch.slurm.queue import JobEntry
from redco_flow.tracking.attempt import Cause, State

SECONDS_TO_CONFIRM = 12.0
"""Between two answers that agree on an end: a job passes for FAILED while it is queued again."""

SECONDS_TO_CONFIRM_EMPTY = 60.0
"""The same for answers without any job, which may be an error of squeue's."""

SECONDS_TO_APPEAR = 5.0
"""After which squeue shows a job that sbatch has submitted."""

SECONDS_OF_URGENCY = 15.0
"""For which Slurm is asked often, as something has happened to a job."""

_CAUSES = {
    "COMPLETED": Cause.FAILED,  # without a result, that is
    "FAILED": Cause.FAILED,
    "CANCELLED": Cause.CANCELLED,
    "REVOKED": Cause.CANCELLED,
    "TIMEOUT": Cause.TIMEOUT,
    "DEADLINE": Cause.TIMEOUT,
    "NODE_FAIL": Cause.NODE_FAILURE,
    "BOOT_FAIL": Cause.NODE_FAILURE,
    "PREEMPTED": Cause.PREEMPTED,
    "OUT_OF_MEMORY": Cause.OUT_OF_MEMORY,
}
WAITING = {
    "PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT",
    "RESV_DEL_HOLD",
}  # fmt: skip
_SUSPENDED = {"SUSPENDED", "STOPPED"}
_NEVER_SATISFIED = "DependencyNeverSatisfied"
_ENDING_WORDS = {
    Cause.TIMEOUT: "its time was over (resources.walltime_minutes)",
    Cause.NODE_FAILURE: "a node failed and the job was not queued again",
    Cause.PREEMPTED: "its nodes were given to another job and it was not queued again",
    Cause.OUT_OF_MEMORY: "it used more memory than it had asked for (resources.memory_gib)",
    Cause.CANCELLED: "it was cancelled by scancel",
}
_FAILED_START = re.compile(r"launch.failed.requeued.held", re.IGNORECASE)
_MAX_FAILED_STARTS = 3


def is_terminal(entry: JobEntry) -> bool:
    """Say whether this state may be a job's last; a requeue can still follow."""
    return entry.state in _CAUSES


def is_same_job(entry: JobEntry, name: str | None, submitted_at: int | None) -> bool:
    """Whether an entry with a job's id is that job's: Slurm may give an id again.

    Args:
        name: of the job; None in records of earlier versions.
        submitted_at: as Slurm first reported it; None if it has not. A requeue makes it later.
    """
    if name and entry.name and entry.name != name:
        return False
    if submitted_at is None or entry.submitted_at is None:
        return True
    was_requeued = entry.restarts is None or entry.restarts > 0
    return entry.submitted_at == submitted_at or (
        was_requeued and entry.submitted_at > submitted_at
    )


def is_held(entry: JobEntry) -> bool:
    """Say whether a node refused the job's start, for which Slurm holds it in the queue."""
    return _FAILED_START.search(entry.reason) is not None


def deserves_release(entry: JobEntry) -> bool:
    """Say whether a held job should be tried on another node; after some of them it is the job."""
    return is_held(entry) and (entry.restarts or 0) <= _MAX_FAILED_STARTS


def waits_for_jobs(entry: JobEntry) -> bool:
    """Say whether a job waits in the queue for the ends of others."""
    return entry.state in WAITING and entry.reason == "Dependency"


def live_status(entry: JobEntry, problem: str) -> JobStatus:
    """Return the status of a job that has not ended.

    Args:
        problem: why Slurm's answer is old; "" where it is not.
    """
    restarts = f", restarted {entry.restarts} times" if entry.restarts else ""
    stale = f" (last known; {problem})" if problem else ""
    source = f"squeue{' of before' if problem else ''}: {entry.state}"
    if entry.state in WAITING:
        reason = entry.reason or entry.state.lower()
        mend = f"; `scontrol release {entry.job_id}` lets it start again" if is_held(entry) else ""
        if why := why_it_never_starts(entry.reason):
            text = (
                f"will never start: {reason}: {why}, then cancel this run and start it again{stale}"
            )
        else:
            text = f"waits in the queue: {reason}{restarts}{mend}{stale}"
        return JobStatus(State.PENDING, message=text, source=source, news=text)
    hosts = entry.hosts or "unnamed nodes"
    if entry.state in _SUSPENDED:
        text = f"is suspended on {hosts} until Slurm resumes it{restarts}{stale}"
        return JobStatus(State.PENDING, message=text, source=source, news=text)
    word = "runs" if entry.state in ("RUNNING", "COMPLETING") else entry.state.lower()
    text = f"{word} on {hosts}{restarts}{stale}"
    return JobStatus(State.RUNNING, message=text, source=source, news=text)


def word_of(entry: JobEntry, log_end: str) -> ClusterWord:
    """Return what Slurm says of a job's end.

    Args:
        log_end: the end of the job's own log, for what went wrong before its ranks began.
    """
    cause = _CAUSES[entry.state]
    if cause is Cause.CANCELLED and entry.reason == _NEVER_SATISFIED:
        why = f"a job that it depends on did not complete ({_NEVER_SATISFIED})"
        return ClusterWord(decided=(cause, f"it never began: {why}."))
    if cause is not Cause.FAILED:
        return ClusterWord(decided=(cause, f"Slurm says {entry.state}: {_ENDING_WORDS[cause]}."))
    text = f"Slurm says {entry.state} and no rank said why; logs/slurm.log ends: {log_end}"
    return ClusterWord(stopped=(cause, text), unstarted=(cause, text))
