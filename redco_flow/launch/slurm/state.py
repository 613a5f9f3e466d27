"""What a Slurm job's state is, from all that says something: its own records first, then Slurm.

Pure: takes an answer of Slurm's and the ranks' endings. Slurm's word for an ending counts only
where the job itself had no time to write one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from redco_flow.launch.job import JobStatus
from redco_flow.launch.rank_endings import RankEnding, find_culprit
from redco_flow.launch.slurm.commands import JobEntry

_CAUSES = {
    "COMPLETED": "failed",  # without a result, that is
    "FAILED": "failed",
    "CANCELLED": "cancelled",
    "REVOKED": "cancelled",
    "TIMEOUT": "timeout",
    "DEADLINE": "timeout",
    "NODE_FAIL": "node_failure",
    "BOOT_FAIL": "node_failure",
    "PREEMPTED": "preempted",
    "OUT_OF_MEMORY": "out_of_memory",
}
_WAITING = {
    "PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT",
    "RESV_DEL_HOLD",
}  # fmt: skip
_ENDING_WORDS = {
    "timeout": "its time was over (resources.walltime_minutes)",
    "node_failure": "a node failed and the job was not queued again",
    "preempted": "its nodes were given to another job and it was not queued again",
    "out_of_memory": "it used more memory than it had asked for (resources.memory_gib)",
    "cancelled": "it was cancelled by scancel",
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
        return JobStatus("pending", message=text, source=source, news=text)
    word = "runs" if entry.state in ("RUNNING", "COMPLETING") else entry.state.lower()
    text = f"{word} on {entry.hosts or 'unnamed nodes'}{restarts}{stale}"
    return JobStatus("running", message=text, source=source, news=text)


def ended_record(
    entry: JobEntry,
    endings: Sequence[RankEnding],
    *,
    was_cancelled: bool,
    has_result: bool,
    log_end: str,
) -> dict[str, Any]:
    """Return the exit.json of a job that ended without writing one itself.

    Args:
        was_cancelled: somebody asked redco-flow to cancel it.
        has_result: its result is published.
        log_end: the end of the job's own log, for what went wrong before its ranks began.
    """
    cause = _CAUSES[entry.state]
    culprit = find_culprit(endings)
    message = f"Slurm says {entry.state}: {_ENDING_WORDS.get(cause, 'see the logs')}."
    if has_result:
        cause, message = "completed", "the result is published."
    elif was_cancelled:
        cause, message = "cancelled", "it was cancelled."
    elif cause == "failed" and culprit is not None:
        cause = culprit.cause
        host = culprit.record["host"]
        message = f"rank {culprit.rank} on {host}: {culprit.record['message']}"
    elif cause == "failed":
        message = f"Slurm says {entry.state} and no rank said why; logs/slurm.log ends: {log_end}"
    return {
        "exit_code": 0 if cause == "completed" else None,
        "signal": None,
        "cause": cause,
        "message": message,
        "peak_memory_bytes": 0,
        "ended_at": None,
    }
