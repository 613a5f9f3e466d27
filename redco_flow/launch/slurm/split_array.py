"""A job array in several: for a stage with more tasks than MaxArraySize or a submit limit allows.

Each array is a `SlurmArray` in `arrays/<number>` of the attempt, with numbers of its own for its
tasks, which are links to the attempt's `tasks/<shard>`. One is submitted after the other, as soon
as Slurm has accepted the one before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from redco_flow.errors import RedcoFlowError
from redco_flow.launch.endings import never_began, write_exit
from redco_flow.launch.job import CallJob, JobStatus, status_from_files
from redco_flow.launch.slurm.array import SlurmArray, array_ending, array_status
from redco_flow.records import write_json
from redco_flow.tracking.attempt import AttemptDirectory, Cause, ExitRecord, State
from redco_flow.tracking.process_identity import utc_now

Submit = Callable[[], SlurmArray]


class SplitArray(CallJob):
    """The tasks of several arrays, as one job.

    Args:
        arrays: the shards of each, in the order of its own task numbers.
        record: the content of job.json.
        submissions: of those that are still to be submitted, in the process that does it.
    """

    def __init__(
        self,
        folder: Path | str,
        arrays: Sequence[Sequence[int]],
        record: Mapping[str, Any],
        submissions: Sequence[Submit] = (),
    ) -> None:
        super().__init__(folder, str(record["job_id"]), arrays[0][:1], record)
        self._shards = [tuple(shards) for shards in arrays]
        self._submissions = list(submissions)
        self._arrays: dict[int, SlurmArray] = {}
        if not submissions:
            self._arrays = dict(self._recorded())

    @property
    def arrays(self) -> list[SlurmArray]:
        """Those arrays that were submitted, or are being so."""
        return list(self._arrays.values())

    @property
    def is_unsubmitted(self) -> bool:
        """Whether Slurm has not accepted all of them yet."""
        return bool(self._submissions) or any(one.is_unsubmitted for one in self.arrays)

    def submit(self) -> None:
        """Submit further arrays until one has to wait for room.

        Raises:
            RedcoFlowError, OSError: the first of them is refused for good.
        """
        while self._submissions and not any(one.is_unsubmitted for one in self.arrays):
            number = len(self._shards) - len(self._submissions)
            try:
                self._arrays[number] = self._submissions[0]()
            except (RedcoFlowError, OSError) as error:
                if not self._arrays:
                    raise
                never = ExitRecord(exit_code=None, cause=Cause.NEVER_SUBMITTED, message=str(error))
                self._end_unsubmitted(never)
                return
            del self._submissions[0]
        self._note_ids()

    def status(self) -> JobStatus:
        """As `SlurmArray`, of all tasks; submits what there is room for."""
        if status := status_from_files(self.attempt):
            return status
        if self._submissions and self.attempt.cancel_path.exists():
            self._end_unsubmitted(never_began("it was cancelled before it was submitted"))
        own = {number: array.status() for number, array in self._arrays.items()}
        self.submit()
        statuses = {
            shard: status
            for number, shards in enumerate(self._shards)
            for shard, status in self._tasks_of(number, shards, own)
        }
        if any(not status.is_finished for status in statuses.values()):
            return array_status(statuses)
        ending = array_ending(
            statuses,
            was_cancelled=self.attempt.cancel_path.exists(),
            has_result=self.attempt.result_path.exists(),
        )
        write_exit(self.attempt, ending)
        return JobStatus.ended(ending, "exit.json")

    def cancel(self, check: bool = True) -> None:  # noqa: FBT001, FBT002 (submitit's signature)
        """Have Slurm end every task of every array, and submit no further one.

        Raises:
            ClusterUnreachable: Slurm does not answer; the tasks run on.
        """
        write_json(self.attempt.cancel_path, {"time": utc_now()})
        for array in self.arrays:
            array.cancel(check=False)
        if check:
            self.wait()

    def record(self) -> dict[str, Any]:
        """Return the content of job.json."""
        return dict(self._record)

    def _recorded(self) -> Iterator[tuple[int, SlurmArray]]:
        for number, shards in enumerate(self._shards):
            attempt = self.attempt.array(number)
            if (record := attempt.read_job()) is not None:
                tasks = range(len(shards))
                yield number, SlurmArray(attempt.path, record["job_id"], tasks, record)

    def _tasks_of(
        self, number: int, shards: Sequence[int], own: Mapping[int, JobStatus]
    ) -> Iterator[tuple[int, JobStatus]]:
        """Yield each task's status by its shard; of an array without an id, the array's."""
        array = self._arrays.get(number)
        status = own.get(number) or status_from_files(self.attempt.array(number))
        if array is not None and array.job_id.isdigit():
            yield from zip(shards, array.task_statuses().values(), strict=True)
            return
        if status is None and (array is not None or self._submissions):
            status = JobStatus(State.PENDING, "waits in the queue: for the array before it")
        elif status is None:
            why = "the launcher that was to submit its array has ended"
            status = JobStatus(Cause.NEVER_SUBMITTED, why, "arrays")
        yield from ((shard, status) for shard in shards)

    def _end_unsubmitted(self, ending: ExitRecord) -> None:
        for number in range(len(self._shards) - len(self._submissions), len(self._shards)):
            write_exit(self.attempt.array(number), ending)
        self._submissions.clear()

    def _note_ids(self) -> None:
        job_id = ",".join(array.job_id for array in self.arrays if array.job_id.isdigit())
        if job_id != self._record["job_id"]:
            self._job_id = self._record["job_id"] = job_id
            write_json(self.attempt.job_path, self._record)


def link_tasks(attempt: AttemptDirectory, number: int, shards: Sequence[int]) -> AttemptDirectory:
    """Make the directory of one array, in which its tasks have numbers from 0; return it."""
    array = attempt.array(number)
    (array.path / "logs").mkdir(parents=True)
    for index, shard in enumerate(shards):
        task = array.task(index).path
        task.parent.mkdir(exist_ok=True)
        task.symlink_to(Path("..", "..", "..", "tasks", str(shard)))
    return array
