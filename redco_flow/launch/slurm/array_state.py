"""What the state of an array of Slurm jobs is, from those of its tasks. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from redco_flow.launch.job import JobStatus

_GRAVEST_FIRST = (
    "failed", "out_of_memory", "stalled", "lost", "node_failure", "timeout", "preempted",
    "cancelled",
)  # fmt: skip


def array_status(tasks: Mapping[int, JobStatus]) -> JobStatus:
    """Return the status of an array that has not ended.

    Args:
        tasks: by shard.
    """
    done = sum(status.state == "completed" for status in tasks.values())
    waiting = [status for status in tasks.values() if status.state == "pending"]
    running = [status for status in tasks.values() if status.state == "running"]
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
    state = "pending" if len(waiting) == len(tasks) else "running"
    source = (running or waiting)[0].source
    return JobStatus(state, message=text, source=source, news=text)


def array_ending(
    tasks: Mapping[int, JobStatus], *, was_cancelled: bool, has_result: bool
) -> dict[str, Any]:
    """Return the exit.json of an array of which every task has ended.

    Its cause is the gravest of its tasks'.

    Args:
        tasks: by shard.
        was_cancelled: somebody asked redco-flow to cancel it.
        has_result: the stage's result is published.
    """
    causes = {shard: status.cause or status.state for shard, status in tasks.items()}
    bad = {shard: cause for shard, cause in causes.items() if cause != "completed"}
    record: dict[str, Any] = {"exit_code": None, "signal": None, "peak_memory_bytes": 0}
    if has_result or not bad:
        return record | {"exit_code": 0, "cause": "completed", "message": "every task is done."}
    shard = min(bad, key=lambda one: (_gravity(bad[one]), one))
    others = f" ({len(bad)} of {len(tasks)} tasks did not complete)" if len(bad) > 1 else ""
    message = f"task {shard}: {tasks[shard].message}{others}"
    if was_cancelled:
        return record | {"cause": "cancelled", "message": "it was cancelled."}
    return record | {"cause": bad[shard], "message": message, "rank": shard}


def _gravity(cause: str) -> int:
    return _GRAVEST_FIRST.index(cause) if cause in _GRAVEST_FIRST else -1
