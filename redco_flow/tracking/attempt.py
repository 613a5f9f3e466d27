"""One try of a stage in a run: its states, which file stands where, and what it holds.

Each file has one writer (named below); readers get None where it does not exist yet, and
DamagedRecord where it is not what that writer wrote. A job of several processes has one rank that
is `the worker` here, rank 0; the files of the others are in `ranks/<rank>/`. A job of several
tasks has a directory like this one for each of them, `tasks/<shard>/`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Required, TypedDict, cast

from redco_flow.local_paths import PathIn
from redco_flow.tracking.process_identity import ProcessRecord
from redco_flow.tracking.typed_records import find_record, read_record_lines, unless_damaged


class State(StrEnum):
    """The state of a run, a stage or a sweep's point.

    Runs have PENDING, RUNNING and the ends COMPLETED, FAILED and CANCELLED; stages WAITING (for a
    cluster, a lock or another run) and SKIPPED (an upstream stage did not complete) too. Nothing
    writes INTERRUPTED: it is what a run is shown as whose orchestrating process is gone. DETACHED
    is the end of that process while its jobs run on. STOPPED_EARLY is the end of a sweep's point
    whose training was not among the best (`--stop-early`).
    """

    PENDING = "pending"
    WAITING = "waiting"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    SKIPPED = "skipped"
    INTERRUPTED = "interrupted"
    DETACHED = "detached"
    STOPPED_EARLY = "stopped_early"


ENDED_RUN_STATES = (State.COMPLETED, State.FAILED, State.CANCELLED, State.STOPPED_EARLY)
ENDED_STAGE_STATES = (*ENDED_RUN_STATES, State.SKIPPED)


class Cause(StrEnum):
    """Cause of the end of a job or a rank.

    LOST: no process that could say so saw the end. NEVER_SUBMITTED: a lost job that no cluster ever
    got, or a stage whose packed job ended before its turn, so that submitting it again repeats
    nothing. TERMINATED, of a rank only: it got SIGTERM,
    from the cluster for reasons of its own or because another rank failed.
    """

    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    STALLED = "stalled"
    OUT_OF_MEMORY = "out_of_memory"
    TIMEOUT = "timeout"
    PREEMPTED = "preempted"
    NODE_FAILURE = "node_failure"
    LOST = "lost"
    NEVER_SUBMITTED = "never_submitted"
    TERMINATED = "terminated"

    @property
    def is_failure(self) -> bool:
        """Whether a rank that ends so ends the other ranks of its job too."""
        return self in (Cause.FAILED, Cause.OUT_OF_MEMORY, Cause.STALLED, Cause.LOST)

    @property
    def is_unobserved(self) -> bool:
        """Whether nothing saw the job's end: it is tried again, at no budget's cost."""
        return self in (Cause.LOST, Cause.NEVER_SUBMITTED)

    @property
    def is_taken_back(self) -> bool:
        """Whether the cluster took the hosts back, after which it starts the job again."""
        return self in (Cause.TERMINATED, Cause.PREEMPTED, Cause.NODE_FAILURE)


class JobRecord(TypedDict, total=False):
    """job.json, by the orchestrator: the executor's name, job id and what it needs to reattach."""

    executor: str
    job_id: str
    attempt: str
    group: list[str]  # of a job of several stages: their attempts, in the order in which they run
    pack: str  # of a job of several runs: the directory of its own files
    turn: int  # of an attempt of such a job: its place in the order in which they run
    members: list[str]  # in that directory's job.json: the attempts, in the order of their turns
    waits_for: dict[str, str]  # by attempts that must have completed before: their jobs' ids
    begins_after: dict[str, str]  # the same of those that must only have ended
    supervisor: ProcessRecord


class CallRecord(TypedDict, total=False):
    """call.json, by the orchestrator, as far as readers without executors know it."""

    run: str
    pipeline: str
    stage: Required[str]
    kind: str
    attempt: int
    config: dict[str, Any]
    inputs: dict[str, list[dict[str, Any]]]
    fingerprint: Required[str]
    num_shards: int


class LastingProgress(TypedDict, total=False):
    """The part of progress.json that holds in all phases: devices, their use, and the model."""

    devices: str | None
    parameters: str | None
    warning: str | None
    tflops_per_device: float | None
    mfu: float | None
    peak_memory_bytes: int | None
    step_seconds: float | None


LASTING = tuple(LastingProgress.__annotations__)


class StageProgress(LastingProgress, total=False):
    """The part of progress.json that a stage reports; None where it has not said."""

    phase: str | None
    step: int | None
    total_steps: int | None
    epoch: float | None
    loss: float | None
    tokens_per_second: float | None
    seconds_left: float | None


class ProgressRecord(StageProgress, total=False):
    """progress.json, by the worker; its change is the worker's heartbeat."""

    time: str


class GpuSample(TypedDict, total=False):
    """One GPU in a SystemSample; what its driver does not report is absent."""

    index: Required[int]
    utilization_percent: int
    memory_used_bytes: int
    memory_total_bytes: int


class SystemSample(TypedDict):
    """A line of system_metrics.jsonl: what the job uses on its first host.

    Of several ranks on it, CPUs and memory are those of rank 0.

    `time` is Unix time; `cpu_cores` the mean number of busy cores since the line before;
    `memory_bytes` the sum of resident sizes, pages that processes share counted in each;
    `disk_free_bytes` of the attempt's file system; `gpus` those that the job may use, by their
    numbers in nvidia-smi.
    """

    time: float
    cpu_cores: float
    memory_bytes: int
    disk_free_bytes: int
    gpus: list[GpuSample]


class ErrorRecord(TypedDict, total=False):
    """error.json, by a worker that fails."""

    type: str
    message: str
    traceback: str


@dataclass(frozen=True, kw_only=True)
class ExitRecord:
    """exit.json: how a job ended; by its supervisor, or by who learns that it left no word.

    Args:
        exit_code: the worker's, where it exited by itself.
        signal: what killed it.
        cause: why it ended.
        message: for people.
        peak_memory_bytes: the worker's largest resident size.
        rank: which of several processes it speaks of, on which host.
        restart: how often the cluster had restarted the job.
        lost_another_rank: whether it failed because it lost another rank.
    """

    exit_code: int | None
    signal: int | None = None
    cause: Cause
    message: str
    peak_memory_bytes: int = 0
    ended_at: str | None = None
    rank: int | None = None
    restart: int | None = None
    host: str | None = None
    lost_another_rank: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the record's content; what only ranks have is left out where it is not known."""
        values = asdict(self)
        own = {key: values.pop(key) for key in ("rank", "restart", "host", "lost_another_rank")}
        known = {key: value for key, value in own.items() if value is not None}
        return values | {key: value for key, value in known.items() if value is not False}


class ResultRecord(TypedDict, total=False):
    """result.json, by the worker, last."""

    fingerprint: str
    outputs: dict[str, str]
    metrics: dict[str, float] | None
    seconds: float
    progress: ProgressRecord  # the last one; progress.json is then removed


_TASKS = "tasks"
_ARRAYS = "arrays"


@dataclass(frozen=True)
class AttemptDirectory:
    """`<run>/stages/<stage>/attempts/<n>/`, as one of the job's processes sees it.

    Args:
        rank: whose progress, metrics, error and result are meant.
    """

    path: Path
    rank: int = 0

    def __fspath__(self) -> str:
        return os.fspath(self.path)

    @property
    def number(self) -> int:
        """The attempt's number, from 1."""
        return int(self.whole.path.name)

    @property
    def stage(self) -> str:
        """The stage's name."""
        return self.whole.path.parent.parent.name

    @property
    def whole(self) -> AttemptDirectory:
        """The attempt that this is a task or an array of; itself where it is neither."""
        is_part = self.path.parent.name in (_TASKS, _ARRAYS)
        return AttemptDirectory(self.path.parent.parent).whole if is_part else self

    def array(self, number: int) -> AttemptDirectory:
        """Return the directory of one of the job arrays that the tasks are submitted as."""
        return AttemptDirectory(self.path / _ARRAYS / str(number))

    def task(self, shard: int) -> AttemptDirectory:
        """Return the directory of the task that computes a shard."""
        return AttemptDirectory(self.path / _TASKS / str(shard))

    @property
    def tasks(self) -> list[AttemptDirectory]:
        """The directories of all tasks, by shard; none where one job does everything."""
        names = (path.name for path in (self.path / _TASKS).glob("*"))
        return [self.task(shard) for shard in sorted(int(name) for name in names)]

    call_path = PathIn("call.json")
    """Path of the work order; written by the orchestrator."""
    job_path = PathIn("job.json")
    """The job's id and how to find it again; by the orchestrator."""
    progress_path = PathIn("progress.json", of="_own")
    """Path of the progress of a worker that has no result yet; written by the worker."""
    metrics_path = PathIn("metrics.jsonl", of="_own")
    """Training log and evaluations, one JSON object a line; by the worker."""
    system_metrics_path = PathIn("system_metrics.jsonl")
    """One SystemSample a line, of a job that has run for a while; by `system_metrics.py`."""
    profile_path = PathIn("profile")
    """The trace of some of its steps, a directory; there once it is whole; by the worker."""
    error_path = PathIn("error.json", of="_own")
    """Path of the worker's error; written by the worker."""
    cancel_path = PathIn("cancel.json")
    """There once redco-flow was asked to cancel the job; by the process that asked."""
    exit_path = PathIn("exit.json")
    """Path of the job's ending; written last by the job, or by a process that finds it gone."""
    result_path = PathIn("result.json", of="_own")
    """The outputs' artifact ids; by the worker, last."""
    logs = PathIn("logs")
    """The folder of the ranks' logs; made by the supervisor."""

    def rank_exit_path(self, rank: int) -> Path:
        """Path of a rank's ending, in a job of several; written by its supervisor."""
        return self.rank_directory(rank) / "exit.json"

    def rank_directory(self, rank: int) -> Path:
        """Directory of one rank's files."""
        return self.path / "ranks" / str(rank)

    @property
    def _own(self) -> Path:
        return self.path if self.rank == 0 else self.rank_directory(self.rank)

    def log_path(self, rank: int = 0) -> Path:
        """Return the path of one rank's output, secrets blotted out; by the supervisor.

        Args:
            rank: or, of a job of several tasks, whose task's.
        """
        task = self.task(rank)
        return task.logs / "rank0.log" if task.path.is_dir() else self.logs / f"rank{rank}.log"

    def ranks_with_logs(self) -> list[int]:
        """Return the ranks, or tasks, whose processes have begun, ascending."""
        if tasks := self.tasks:
            return [int(task.path.name) for task in tasks if task.log_path().exists()]
        names = (path.stem.removeprefix("rank") for path in self.logs.glob("rank*.log"))
        return sorted(int(name) for name in names if name.isdigit())

    def read_call(self) -> dict[str, Any] | None:
        """Return call.json."""
        return cast("dict[str, Any] | None", find_record(self.call_path, CallRecord))

    def read_job(self) -> JobRecord | None:
        """Return job.json."""
        return find_record(self.job_path, JobRecord, needs=("executor", "job_id"))

    def read_progress(self) -> ProgressRecord | None:
        """Return the worker's progress; of a job of several tasks, how many of them are done."""
        if tasks := self.tasks:
            return _progress_of(tasks)
        found = find_record(self.progress_path, ProgressRecord, needs=("time",))
        # In this order, for the worker removes the first when it has written the second. A copy of
        # the first that was fetched from a host is older.
        result = unless_damaged(self.read_result) or {}
        return result.get("progress", found)

    def read_error(self) -> ErrorRecord | None:
        """Return error.json."""
        return find_record(self.error_path, ErrorRecord, needs=("type", "message"))

    def read_exit(self) -> ExitRecord | None:
        """Return exit.json."""
        return find_record(self.exit_path, ExitRecord)

    @property
    def cause(self) -> Cause | None:
        """Cause of the job's end by exit.json; None while it does not exist."""
        record = self.read_exit()
        return None if record is None else record.cause

    def read_result(self) -> ResultRecord | None:
        """Return result.json."""
        return find_record(self.result_path, ResultRecord, needs=("fingerprint", "outputs"))

    def read_metrics(self) -> Iterator[dict[str, Any]]:
        """Yield metrics.jsonl's records; none where the worker has written none."""
        if self.metrics_path.is_file():
            yield from read_record_lines(self.metrics_path, dict[str, Any])

    def read_system_metrics(self) -> Iterator[SystemSample]:
        """Yield system_metrics.jsonl's records; none where there is no such file.

        Raises:
            DamagedRecord: after the last record, where a line was not written whole.
        """
        if self.system_metrics_path.is_file():
            yield from read_record_lines(self.system_metrics_path, SystemSample, goes_on=True)


def _progress_of(tasks: list[AttemptDirectory]) -> ProgressRecord | None:
    """Count the computed parts of a stage, those of earlier attempts included."""
    told = [progress for task in tasks if (progress := task.read_progress()) is not None]
    if not told:
        return None
    num_open = sum(task.cause is not Cause.COMPLETED for task in tasks)
    num_shards = int((tasks[0].read_call() or {}).get("num_shards", len(tasks)))
    return {
        "phase": f"{num_shards - num_open}/{num_shards} shards done",
        "time": max(progress["time"] for progress in told),
    }
