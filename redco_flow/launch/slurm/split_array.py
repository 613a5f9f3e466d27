"""A job array in several: for a stage with more tasks than MaxArraySize or a submit limit allows.

Each array is a `SlurmArray` in `arrays/<number>` of the attempt, with its own numbers of
tasks, which are links to the attempt's `tasks/<shard>`. One is submitted after the other, as soon
as Slurm has accepted the one before it. Only the process that drives the run submits; for others
the arrays that are not submitted are pending, and the attempt has not ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from redco_flow.errors import ClusterUnreachable, RedcoFlowError
from redco_flow.launch.endings import never_submitted, write_exit
from redco_flow.launch.job import CallJob, JobStatus, status_from_files
from redco_flow.launch.slurm.array import SlurmArray, end_of_tasks
from redco_flow.records import write_json
from redco_flow.tracking.attempt import AttemptDirectory, Cause, ExitRecord, State
from redco_flow.tracking.process_identity import utc_now

Submit = Callable[[int], SlurmArray]


class SplitArray(CallJob):
    """The tasks of several arrays, as one job.

    Args:
        arrays: the shards of each, in the order of its own task numbers.
        record: the content of job.json.
    """

    def __init__(
        self,
        folder: Path | str,
        arrays: Sequence[Sequence[int]],
        record: Mapping[str, Any],
    ) -> None:
        super().__init__(folder, str(record["job_id"]), arrays[0][:1], record)
        self._shards = [tuple(shards) for shards in arrays]
        self._submit_array: Submit | None = None
        self._left: list[int] = []
        self._arrays: dict[int, SlurmArray] = {}
        self._find_arrays()

    @property
    def arrays(self) -> list[SlurmArray]:
        """Those arrays that were submitted, or are being so."""
        return list(self._arrays.values())

    def array_before(self, number: int) -> list[SlurmArray]:
        """Return the array before one, if there is one."""
        return [array for before, array in self._arrays.items() if before == number - 1]

    @property
    def is_unsubmitted(self) -> bool:
        """Whether Slurm has not accepted all of them yet."""
        if self._submit_array is not None:
            return bool(self._left) or any(one.is_unsubmitted for one in self.arrays)
        self._find_arrays()
        if self.attempt.cancel_path.exists() or self.attempt.read_exit() is not None:
            return False
        return any(
            not self._has_id(number) and self.attempt.array(number).read_exit() is None
            for number in range(len(self._shards))
        )

    @property
    def is_driven(self) -> bool:
        """Whether `status` submits what there is room for."""
        return self._submit_array is not None

    def drive(self, submit: Submit, search: Callable[[int, SlurmArray], None]) -> None:
        """Have `status` submit the arrays that are not; call it under the lease of the run.

        Args:
            submit: submits the array of a number.
            search: has an array submitted again whose launcher ended before it knew its id, if
                Slurm does not have it.
        """
        self._find_arrays()
        self._submit_array = submit
        self._left = [
            number
            for number in range(len(self._shards))
            if number not in self._arrays and self.attempt.array(number).read_exit() is None
        ]
        for number, array in self._arrays.items():
            if not self._has_id(number) and self.attempt.array(number).read_exit() is None:
                search(number, array)

    def submit(self, *, is_first: bool = True) -> None:
        """Submit further arrays until one has to wait for room.

        Args:
            is_first: raise where the first of them is refused for good; else the job ends.

        Raises:
            RedcoFlowError, OSError: as above.
        """
        if self._submit_array is None:
            return
        while self._left and not any(one.is_unsubmitted for one in self.arrays):
            number = self._left[0]
            try:
                self._arrays[number] = self._submit_array(number)
            except (RedcoFlowError, OSError) as error:
                if is_first and not self._arrays:
                    raise
                self._end_unsubmitted(never_submitted(str(error)))
                return
            del self._left[0]
        self._note_ids()

    def status(self) -> JobStatus:
        """As `SlurmArray`, of all tasks; submits what there is room for."""
        if status := status_from_files(self.attempt):
            return status
        if self._submit_array is None:
            self._find_arrays()
        if self.attempt.cancel_path.exists():
            self._left.clear()
            self._cancel_newest()
        own = {number: array.status() for number, array in self._arrays.items()}
        self.submit(is_first=False)
        statuses = {
            shard: status
            for number, shards in enumerate(self._shards)
            for shard, status in self._tasks_of(number, shards, own)
        }
        return end_of_tasks(self.attempt, statuses)

    def cancel(self, check: bool = True) -> None:  # noqa: FBT001, FBT002 (submitit's signature)
        """Have Slurm end every task of every array, and submit no further one.

        Raises:
            ClusterUnreachable: Slurm does not answer; the tasks run on.
        """
        write_json(self.attempt.cancel_path, {"time": utc_now()})
        if self._submit_array is None:
            self._find_arrays()
        for array in self.arrays:
            array.cancel(check=False)
        if check:
            self.wait()

    def _cancel_newest(self) -> None:
        """Cancel an array that was being submitted when another process cancelled the others."""
        for array in self.arrays:
            if not array.attempt.cancel_path.exists():
                with suppress(ClusterUnreachable):  # at the next look, again
                    array.cancel(check=False)

    def _has_id(self, number: int) -> bool:
        return number in self._arrays and self._arrays[number].job_id.isdigit()

    def _find_arrays(self) -> None:
        """Find those that another process has submitted since."""
        for number, shards in enumerate(self._shards):
            attempt = self.attempt.array(number)
            if self._has_id(number) or (record := attempt.read_job()) is None:
                continue
            if number not in self._arrays or record["job_id"]:
                tasks = range(len(shards))
                self._arrays[number] = SlurmArray(attempt.path, record["job_id"], tasks, record)

    def _tasks_of(
        self, number: int, shards: Sequence[int], own: Mapping[int, JobStatus]
    ) -> Iterator[tuple[int, JobStatus]]:
        """Yield each task's status by its shard; of an array without an id, the array's."""
        if self._has_id(number):
            yield from zip(shards, self._arrays[number].task_statuses().values(), strict=True)
            return
        status = status_from_files(self.attempt.array(number)) or own.get(number)
        # Without a record of its end it may still be submitted, unless the attempt is cancelled.
        is_recorded = self.attempt.array(number).exit_path.exists()
        if status is None or (status.is_finished and not is_recorded):
            status = JobStatus(State.PENDING, "waiting: for the array before it")
            if not self.is_driven:
                status = JobStatus(State.PENDING, "waiting: for the launcher to submit its array")
            if self.attempt.cancel_path.exists():
                why = "it was cancelled before it was submitted"
                status = JobStatus(Cause.CANCELLED, why, "cancel")
        yield from ((shard, status) for shard in shards)

    def _end_unsubmitted(self, ending: ExitRecord) -> None:
        for number in self._left:
            self.attempt.array(number).path.mkdir(parents=True, exist_ok=True)
            write_exit(self.attempt.array(number), ending)
        self._left.clear()

    def _note_ids(self) -> None:
        job_id = ",".join(array.job_id for array in self.arrays if array.job_id.isdigit())
        if job_id != self._record["job_id"]:
            self._job_id = self._record["job_id"] = job_id
            write_json(self.attempt.job_path, self._record)


def link_tasks(attempt: AttemptDirectory, number: int, shards: Sequence[int]) -> AttemptDirectory:
    """Make the directory of one array, in which its tasks have numbers from 0; return it."""
    array = attempt.array(number)
    (array.path / "logs").mkdir(parents=True, exist_ok=True)
    for index, shard in enumerate(shards):
        task = array.task(index).path
        task.parent.mkdir(exist_ok=True)
        with suppress(FileExistsError):  # of a launcher that ended before it submitted the array
            task.symlink_to(Path("..", "..", "..", "tasks", str(shard)))
    return array
