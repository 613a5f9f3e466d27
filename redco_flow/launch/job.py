"""A job that runs one stage call, as submitit users know jobs; its truth is the attempt's files.

What every executor shares: submitit's `Job` face (done, wait, result, exception, stdout, paths)
read from exit.json and result.json instead of pickles. What differs, asking a cluster and
stopping a job, is left to the subclass.
"""

from __future__ import annotations

import os
import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from submitit.core.core import Job
from submitit.core.utils import (
    DelayedSubmission,
    FailedJobError,
    JobPaths,
    UncompletedJobError,
)

from redco_flow.errors import RunCancelled, StageFailed, UsageError
from redco_flow.launch.endings import ClusterWord, judge
from redco_flow.launch.worker_exit import explain_error
from redco_flow.tracking.attempt import AttemptDirectory, Cause, ExitRecord, State

_SECONDS_BETWEEN_LOOKS = 0.05
_STDOUT_BYTES = 1 << 20
_NUM_LINES_SHOWN = 20


@dataclass(frozen=True)
class JobStatus:
    """The state of a job.

    Args:
        state: PENDING or RUNNING; of a job that has ended, why.
        message: for people.
        source: what says so: a file's name, or the process table.
        news: reported to followers when it changes: why it waits, where it runs.
        exit_code: the worker's, where it exited by itself.
    """

    state: State | Cause
    message: str = ""
    source: str = ""
    news: str = ""
    exit_code: int | None = None

    @classmethod
    def ended(cls, record: ExitRecord, source: str) -> JobStatus:
        """Return the status of a job that ended as its record says."""
        return cls(record.cause, record.message, source, exit_code=record.exit_code)

    @property
    def cause(self) -> Cause | None:
        """Cause of the job's end; None before it."""
        return self.state if isinstance(self.state, Cause) else None

    @property
    def is_finished(self) -> bool:
        """Whether nothing will change any more."""
        return self.cause is not None


class StageJobFailed(FailedJobError, StageFailed):
    """The stage ran and failed."""


class StageJobLost(UncompletedJobError, StageFailed):
    """The job's end was not observed."""


class StageJobCancelled(UncompletedJobError, RunCancelled):
    """The job was stopped before it had a result."""


class StageCall(DelayedSubmission):
    """The submitted object: an attempt's directory with its call.json; never a pickle."""

    def __init__(self, attempt: AttemptDirectory) -> None:
        super().__init__(attempt.read_result)
        self.attempt = attempt

    def dump(self, filepath: str | Path) -> None:
        """Refuse.

        Raises:
            UsageError: always.
        """
        raise UsageError(f"{filepath}: a stage call is call.json; it is never pickled.")


class AttemptPaths(JobPaths):
    """submitit's names for the attempt's files; its %j patterns mean nothing here."""

    def _format_id(self, path: Path | str) -> Path:
        return Path(path)

    @property
    def stdout(self) -> Path:
        """The log of this task: stdout and stderr as they came, secrets blotted out."""
        return AttemptDirectory(self._folder).log_path(self.task_id)

    @property
    def stderr(self) -> Path:
        """The same file."""
        return self.stdout

    @property
    def submission_file(self) -> Path:
        """The submitted script or command."""
        return AttemptDirectory(self._folder).call_path


class CallJob(Job[dict[str, Any]]):
    """A job of any executor. Picklable, and the same from every process."""

    def __init__(
        self,
        folder: Path | str,
        job_id: str,
        tasks: Sequence[int] = (0,),
        record: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(folder, job_id, tasks)
        self._paths = AttemptPaths(folder, job_id=job_id, task_id=self.task_id)
        self._record = dict(record or self.attempt.read_job() or {})

    @abstractmethod
    def status(self) -> JobStatus:
        """Say what is known now; never waits."""

    @abstractmethod
    def cancel(self, check: bool = True) -> None:  # noqa: FBT001, FBT002 (submitit's signature)
        """Ask the job to stop, and kill it when its grace is over.

        Args:
            check: wait until it has ended.
        """

    def record(self) -> dict[str, Any]:
        """Return what job.json holds: what `reattach` needs."""
        return dict(self._record)

    @property
    def is_unsubmitted(self) -> bool:
        """Whether the cluster has refused the job for a while, and `status` submits it again."""
        return False

    @property
    def records_may_be_late(self) -> bool:
        """Whether it runs on another host, whose files a network file system may show late."""
        return True

    @property
    def attempt(self) -> AttemptDirectory:
        """The directory of the job's files."""
        return AttemptDirectory(self._paths.folder)

    @property
    def state(self) -> str:
        """The state in capitals, in Slurm's words where it has one."""
        return self.status().state.upper()

    def get_info(self, mode: str = "force") -> dict[str, str]:
        """Return the state as submitit's tools want it."""
        return {"jobState": self.state}

    def submission(self) -> StageCall:
        """Return what was submitted."""
        return StageCall(self.attempt)

    def done(self, force_check: bool = False) -> bool:  # noqa: FBT001, FBT002
        """Say whether the job has ended, from files and processes alone, in any process."""
        return self.status().is_finished

    def wait(self) -> None:
        """Wait for the end."""
        while not self.wait_seconds(60.0):
            pass

    def wait_seconds(self, seconds: float) -> bool:
        """Wait for the end, at most so long; return whether it came."""
        deadline = time.monotonic() + seconds
        while not self.done():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            self._doze(left)
        return True

    def exception(self) -> FailedJobError | UncompletedJobError | None:
        """Wait, then return what `result` would raise: job id, log path, last lines."""
        self.wait()
        status = self.status()
        if status.cause is Cause.COMPLETED:
            return None
        if status.cause is Cause.CANCELLED:
            return StageJobCancelled(self._describe(status))
        if status.cause is not None and status.cause.is_unobserved:
            return StageJobLost(self._describe(status))
        return StageJobFailed(self._describe(status))

    def _get_outcome_and_result(self) -> tuple[str, Any]:
        if self.status().cause is not Cause.COMPLETED:
            return "error", None
        return "success", self.attempt.read_result()

    def _get_logs_string(self, name: str) -> str | None:
        """Return the log; of a huge one its end, and where the rest is."""
        if name not in ("stdout", "stderr"):
            raise ValueError(f"unknown stream {name!r}; there are stdout and stderr, one file.")
        path = self.paths.stdout
        if not path.exists():
            return None
        return read_log_end(path)

    def _describe(self, status: JobStatus) -> str:
        log = self._culprits_log()
        text = read_log_end(log) if log.exists() else ""
        lines = text.splitlines()[-_NUM_LINES_SHOWN:]
        shown = "\n".join(f"  {line[:1000]}" for line in lines)
        return (
            f"stage '{self.attempt.stage}', attempt {self.attempt.path.name}: {status.state}: "
            f"{status.message}\njob {self.job_id}, log {log}, its last lines:\n{shown}"
        )

    def _culprits_log(self) -> Path:
        """The log of the rank that ended the job, as far as exit.json says which."""
        record = self.attempt.read_exit()
        return self.attempt.log_path(record.rank or 0 if record is not None else 0)

    def _doze(self, seconds: float) -> None:
        """Pass some of `seconds`, less if the job ends; subclasses know better ways."""
        time.sleep(min(seconds, _SECONDS_BETWEEN_LOOKS))

    def _register_in_watcher(self) -> None:
        """Nothing polls a cluster for this job."""

    def __del__(self) -> None:
        if self.__dict__.get("_cancel_at_deletion") and not self.done():
            self.cancel(check=False)


def status_from_files(attempt: AttemptDirectory) -> JobStatus | None:
    """Return how the job ended, by its own records; None while they say nothing."""
    record = attempt.read_exit()
    return None if record is None else JobStatus.ended(record, "exit.json")


def status_without_supervisor(attempt: AttemptDirectory, why: str) -> JobStatus:
    """Return how a job of one process ended whose supervisor is gone without exit.json."""
    error = attempt.read_error()
    word = (Cause.LOST, why) if error is None else explain_error(error)
    source = "process table" if error is None else "error.json"
    record = judge(
        [],
        1,
        ClusterWord(unstarted=word),
        has_result=attempt.result_path.exists(),  # the worker's last act
        was_cancelled=attempt.cancel_path.exists(),
    )
    return JobStatus.ended(record, "result.json" if attempt.result_path.exists() else source)


def read_log_end(path: Path, max_bytes: int = _STDOUT_BYTES) -> str:
    """Return a log's text, or its last `max_bytes` with a line that says so; any bytes do."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - max_bytes))
        text = file.read().decode("utf-8", "replace")
    if size <= max_bytes:
        return text
    return f"[{size - max_bytes} bytes before this are left out; the whole log: {path}]\n{text}"
