"""What Slurm's answers mean: the state of a job that has not ended, and why one has."""

from __future__ import annotations

import re

from redco_flow.launch.endings import ClusterWord
from redco_flow.launch.job import JobStatus
from redco_flow.launch.slurm.commands import JobEntry
from redco_flow.tracking.states import Cause, State

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
_WAITING = {
    "PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT",
    "RESV_DEL_HOLD",
}  # fmt: skip
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


def is_held(entry: JobEntry) -> bool:
    """Say whether a node refused the job's start, for which Slurm holds it in the queue."""
    return _FAILED_START.search(entry.reason) is not None


def deserves_release(entry: JobEntry) -> bool:
    """Say whether a held job should be tried on another node; after some of them it is the job."""
    return is_held(entry) and (entry.restarts or 0) <= _MAX_FAILED_STARTS


def live_status(entry: JobEntry, problem: str) -> JobStatus:
    """Return the status of a job that has not ended.

    Args:
        problem: why Slurm's answer is old; "" where it is not.
    """
    restarts = f", started anew {entry.restarts} times" if entry.restarts else ""
    stale = f" (last known; {problem})" if problem else ""
    source = f"squeue{' of before' if problem else ''}: {entry.state}"
    if entry.state in _WAITING:
        reason = entry.reason or entry.state.lower()
        mend = f"; `scontrol release {entry.job_id}` lets it start again" if is_held(entry) else ""
        text = f"waits in the queue: {reason}{restarts}{mend}{stale}"
        return JobStatus(State.PENDING, message=text, source=source, news=text)
    word = "runs" if entry.state in ("RUNNING", "COMPLETING") else entry.state.lower()
    text = f"{word} on {entry.hosts or 'unnamed nodes'}{restarts}{stale}"
    return JobStatus(State.RUNNING, message=text, source=source, news=text)


def word_of(entry: JobEntry, log_end: str) -> ClusterWord:
    """Return what Slurm says of a job's end.

    Args:
        log_end: the end of the job's own log, for what went wrong before its ranks began.
    """
    cause = _CAUSES[entry.state]
    if cause is not Cause.FAILED:
        return ClusterWord(decided=(cause, f"Slurm says {entry.state}: {_ENDING_WORDS[cause]}."))
    text = f"Slurm says {entry.state} and no rank said why; logs/slurm.log ends: {log_end}"
    return ClusterWord(stopped=(cause, text), unstarted=(cause, text))
