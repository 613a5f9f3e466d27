"""An array of Slurm jobs: one task for each shard of a stage, each with its own records.

A task is a job like any other, in a directory of its own, and queued again by itself. The array
has ended when each of its tasks has; what it made is published by the task that came last.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from redco_flow.launch.endings import write_exit
from redco_flow.launch.job import CallJob, JobStatus, status_from_files
from redco_flow.launch.slurm.job import SlurmJob
from redco_flow.launch.slurm.resubmission import Resubmission
from redco_flow.records import write_json
from redco_flow.tracking.attempt import AttemptDirectory, Cause, ExitRecord, State
from redco_flow.tracking.process_identity import utc_now

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
            status.message.removeprefix("waits in the queue: ").removeprefix("waiting: ")
            for status in waiting
        )
        parts.append(f"{len(waiting)} waiting ({', '.join(reasons)})")
    if ended := len(tasks) - done - len(waiting) - len(running):
        parts.append(f"{ended} failed")
    text = ", ".join(parts)
    state = State.PENDING if len(waiting) == len(tasks) else State.RUNNING
    source = (running or waiting)[0].source
    return JobStatus(state, message=text, source=source, news=text)


def end_of_tasks(attempt: AttemptDirectory, statuses: Mapping[int, JobStatus]) -> JobStatus:
    """Return the status of a stage by its tasks'; where all have ended, write the attempt's end."""
    if any(not status.is_finished for status in statuses.values()):
        return array_status(statuses)
    ending = array_ending(
        statuses,
        was_cancelled=attempt.cancel_path.exists(),
        has_result=attempt.result_path.exists(),
    )
    write_exit(attempt, ending)
    return JobStatus.ended(ending, "exit.json")


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


_SECONDS_BETWEEN_LOOKS = 0.5


class SlurmArray(CallJob):
    """The tasks of one array, as one job.

    Args:
        shards: one task each.
        record: the content of job.json.
    """

    def __init__(
        self,
        folder: Path | str,
        job_id: str,
        shards: Sequence[int],
        record: Mapping[str, Any] | None = None,
    ) -> None:
        self._array = SlurmJob(folder, job_id, record=record)
        super().__init__(folder, self._array.job_id, shards[:1], record)
        self._shards = tuple(shards)
        self._jobs: dict[int, SlurmJob] = {}
        self._ended: dict[int, JobStatus] = {}
        self._seen: tuple[float, JobStatus] | None = None

    def status(self) -> JobStatus:
        """Say what exit.json says, else what the tasks' own records and Slurm say of them."""
        if status := status_from_files(self.attempt):
            return status
        if status := self._array.search():
            return status
        self._job_id = self._array.job_id
        now = time.monotonic()
        if self._seen is None or now - self._seen[0] >= _SECONDS_BETWEEN_LOOKS:
            self._seen = now, end_of_tasks(self.attempt, self.task_statuses())
        return self._seen[1]

    def cancel(self, check: bool = True) -> None:  # noqa: FBT001, FBT002 (submitit's signature)
        """Have Slurm end every task; a second call kills at once.

        Raises:
            ClusterUnreachable: Slurm does not answer; the tasks run on.
        """
        for shard in self._shards:
            write_json(self.attempt.task(shard).cancel_path, {"time": utc_now()})
        self._array.cancel(check=False)
        for task in self._jobs.values():
            task.expect_end()
        if check:
            self.wait()

    def note_submitted(self) -> None:
        """As `SlurmJob.note_submitted`, for each task."""
        for shard in self._shards:
            self._task(shard).note_submitted()

    def retry_submission(self, resubmission: Resubmission) -> None:
        """As `SlurmJob.retry_submission`, for the whole array."""
        self._array.retry_submission(resubmission)

    @property
    def is_unsubmitted(self) -> bool:
        """As `SlurmJob.is_unsubmitted`."""
        return self._array.is_unsubmitted

    def record(self) -> dict[str, Any]:
        """Return the content of job.json."""
        return self._array.record()

    def task_statuses(self) -> dict[int, JobStatus]:
        """Return the status of each task by its number, once the array's id is known."""
        return {shard: self._status_of(shard) for shard in self._shards}

    def _status_of(self, shard: int) -> JobStatus:
        if shard not in self._ended:
            status = self._task(shard).status()
            if not status.is_finished:
                return status
            self._ended[shard] = status
        return self._ended[shard]

    def _task(self, shard: int) -> SlurmJob:
        if shard not in self._jobs:
            folder = self.attempt.task(shard).path
            job_id = f"{self._array.job_id}_{shard}"
            record = self.record() | {"job_id": job_id, "attempt": str(folder)}
            self._jobs[shard] = SlurmJob(folder, job_id, record=record)
        return self._jobs[shard]
