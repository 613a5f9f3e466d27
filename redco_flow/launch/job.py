"""A job that runs one stage call, as submitit users know jobs; its truth is the attempt's files.

What every executor shares: submitit's `Job` face (done, wait, result, exception, stdout, paths)
read from exit.json and result.json instead of pickles. What differs, asking a cluster and
stopping a job, is left to the subclass.
"""

from __future__ import annotations

import os
import time
from abc import abstractmethod
from collections.abc import Sequence
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
from redco_flow.launch.ending import explain
from redco_flow.tracking.attempt import AttemptDirectory

NEVER_SUBMITTED = "never_submitted"
"""The cause of a lost job that no cluster ever got: submitting it again repeats nothing."""

UNSEEN = (NEVER_SUBMITTED, "lost")
"""Causes of an end that nobody saw: whoever takes the run up tries again, at no budget's cost."""

_UNFINISHED = ("pending", "running")
_SECONDS_BETWEEN_LOOKS = 0.05
_STDOUT_BYTES = 1 << 20
_NUM_LINES_SHOWN = 20


@dataclass(frozen=True)
class JobStatus:
    """What is known of a job.

    Args:
        state: pending, running, completed, failed, cancelled, stalled, out_of_memory, lost,
            and of clusters: preempted, timeout, node_failure.
        exit_code: the worker's, where it exited by itself.
        cause: why it ended: one of the states after running; None while it has not.
        message: for people.
        source: what says so: a file's name, or the process table.
        news: what followers should be told when it changes: why it waits, where it runs.
    """

    state: str
    exit_code: int | None = None
    cause: str | None = None
    message: str = ""
    source: str = ""
    news: str = ""

    @property
    def is_finished(self) -> bool:
        """Whether nothing will change any more."""
        return self.state not in _UNFINISHED


class StageJobFailed(FailedJobError, StageFailed):
    """The stage ran and failed."""


class StageJobLost(UncompletedJobError, StageFailed):
    """Nobody saw the job's end."""


class StageJobCancelled(UncompletedJobError, RunCancelled):
    """The job was stopped before it had a result."""


class StageCall(DelayedSubmission):
    """What is submitted: an attempt's directory with its call.json; never a pickle."""

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
        """What was submitted."""
        return AttemptDirectory(self._folder).call_path


class CallJob(Job[dict[str, Any]]):
    """A job of any executor. Picklable, and the same from every process."""

    def __init__(self, folder: Path | str, job_id: str, tasks: Sequence[int] = (0,)) -> None:
        super().__init__(folder, job_id, tasks)
        self._paths = AttemptPaths(folder, job_id=job_id, task_id=self.task_id)

    @abstractmethod
    def status(self) -> JobStatus:
        """Say what is known now; never waits."""

    @abstractmethod
    def cancel(self, check: bool = True) -> None:  # noqa: FBT001, FBT002 (submitit's signature)
        """Ask the job to stop, and kill it when its grace is over.

        Args:
            check: wait until it has ended.
        """

    @abstractmethod
    def record(self) -> dict[str, Any]:
        """Return what job.json holds: what `reattach` needs."""

    @property
    def attempt(self) -> AttemptDirectory:
        """Where the job's files are."""
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
        """Say whether the job has ended, from files and processes alone, whoever asks."""
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
        if status.state == "completed":
            return None
        if status.state == "cancelled":
            return StageJobCancelled(self._describe(status))
        if status.state == "lost":
            return StageJobLost(self._describe(status))
        return StageJobFailed(self._describe(status))

    def _get_outcome_and_result(self) -> tuple[str, Any]:
        if self.status().state != "completed":
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
        return self.attempt.log_path((self.attempt.read_exit() or {}).get("rank", 0))

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
    if record is not None:
        return JobStatus(
            state=record["cause"],
            exit_code=record["exit_code"],
            cause=record["cause"],
            message=record["message"],
            source="exit.json",
        )
    return None


def status_without_supervisor(attempt: AttemptDirectory, why: str) -> JobStatus:
    """Return how a job ended whose supervisor is gone without exit.json."""
    if attempt.result_path.exists():  # the worker's last act
        return JobStatus("completed", 0, "completed", "the result is published.", "result.json")
    error = attempt.read_error()
    if error is not None:
        message = f"{error.get('type')}: {error.get('message')}"
        cause, advice = explain(str(error.get("type")), str(error.get("message")))
        return JobStatus(cause, None, cause, f"{message} {advice}".strip(), "error.json")
    return JobStatus("lost", None, "lost", why, "process table")


def read_log_end(path: Path, max_bytes: int = _STDOUT_BYTES) -> str:
    """Return a log's text, or its last `max_bytes` with a line that says so; any bytes do."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - max_bytes))
        text = file.read().decode("utf-8", "replace")
    if size <= max_bytes:
        return text
    return f"[{size - max_bytes} bytes before this are left out; the whole log: {path}]\n{text}"
