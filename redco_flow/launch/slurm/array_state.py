"""What the state of an array of Slurm jobs is, from those of its tasks. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from redco_flow.launch.job import JobStatus
from redco_flow.tracking.attempt import ExitRecord
from redco_flow.tracking.states import Cause, State

_GRAVEST_FIRST = (
    Cause.NEVER_SUBMITTED, Cause.FAILED, Cause.OUT_OF_MEMORY, Cause.STALLED, Cause.LOST,
    Cause.NODE_FAILURE, Cause.TIMEOUT, Cause.PREEMPTED, Cause.CANCELLED,
)  # fmt: skip


def array_status(tasks: Mapping[int, JobStatus]) -> JobStatus:
    """Return the status of an array that has not ended.

    Args:
        tasks: by shard.
    """
    done = sum(status.cause is Cause.COMPLETED for status in tasks.values())
    waiting = [status for status in tasks.values() if status.state is State.PENDING]
    running = [status for status in tasks.values() if status.state is State.RUNNING]
    parts = [f"{done} of {len(tasks)} tasks done"]
    if running:
        parts.append(f"{len(running)} at work")
    if waiting:
        reasons = dict.fromkeys(
            status.message.removeprefix("waits in the queue: ") for status in waiting
        )
        parts.append(f"{len(waiting)} waiting ({', '.join(reasons)})")
    if ended := len(tasks) - done - len(waiting) - len(running):
        parts.append(f"{ended} failed")
    text = ", ".join(parts)
    state = State.PENDING if len(waiting) == len(tasks) else State.RUNNING
    source = (running or waiting)[0].source
    return JobStatus(state, message=text, source=source, news=text)


def array_ending(
    tasks: Mapping[int, JobStatus], *, was_cancelled: bool, has_result: bool
) -> ExitRecord:
    """Return the exit.json of an array of which every task has ended.

    Its cause is the gravest of its tasks'.

    Args:
        tasks: by shard.
        was_cancelled: redco-flow was asked to cancel it.
        has_result: the stage's result is published.
    """
    causes = {shard: status.cause for shard, status in tasks.items() if status.cause is not None}
    bad = {shard: cause for shard, cause in causes.items() if cause is not Cause.COMPLETED}
    if has_result or not bad:
        return ExitRecord(exit_code=0, cause=Cause.COMPLETED, message="every task is done.")
    if was_cancelled:
        return ExitRecord(exit_code=None, cause=Cause.CANCELLED, message="it was cancelled.")
    shard = min(bad, key=lambda one: (_GRAVEST_FIRST.index(bad[one]), one))
    others = f" ({len(bad)} of {len(tasks)} tasks did not complete)" if len(bad) > 1 else ""
    message = f"task {shard}: {tasks[shard].message}{others}"
    return ExitRecord(exit_code=None, cause=bad[shard], message=message, rank=shard)
