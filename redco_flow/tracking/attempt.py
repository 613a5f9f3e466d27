"""One try of a stage in a run: which file stands where, and what it holds.

Each file has one writer (named below); readers get None where it does not exist yet. Knows
nothing of how a job is started. A job of several processes has one rank that is `the worker`
here, rank 0; what the others write stands in `ranks/<rank>/`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict, cast

from redco_flow.records import read_json_if_present, read_json_lines


class JobRecord(TypedDict, total=False):
    """job.json, by the orchestrator: the executor's name, job id and what it needs to reattach."""

    executor: str
    job_id: str


class Progress(TypedDict, total=False):
    """progress.json, by the worker; its change is the worker's heartbeat."""

    phase: str
    step: int | None
    total_steps: int | None
    epoch: float | None
    loss: float | None
    tokens_per_second: float | None
    seconds_left: float | None
    time: str


class ErrorRecord(TypedDict, total=False):
    """error.json, by a worker that fails."""

    type: str
    message: str
    traceback: str


class ExitRecord(TypedDict, total=False):
    """exit.json, by the supervisor, last; cause: completed, failed, cancelled, stalled, ….

    Of one rank of several: `ranks/<rank>/exit.json`, with rank, restart and host.
    """

    exit_code: int | None
    signal: int | None
    cause: str
    message: str
    ended_at: str
    rank: int
    restart: int
    host: str


class ResultRecord(TypedDict, total=False):
    """result.json, by the worker, last."""

    fingerprint: str
    outputs: dict[str, str]
    metrics: dict[str, float] | None
    seconds: float


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
        return int(self.path.name)

    @property
    def stage(self) -> str:
        """The stage's name."""
        return self.path.parent.parent.name

    @property
    def call_path(self) -> Path:
        """What the worker must do; by the orchestrator."""
        return self.path / "call.json"

    @property
    def job_path(self) -> Path:
        """The job's id and how to find it again; by the orchestrator."""
        return self.path / "job.json"

    @property
    def progress_path(self) -> Path:
        """How far the worker is; by the worker."""
        return self._own / "progress.json"

    @property
    def metrics_path(self) -> Path:
        """Training log and evaluations, one JSON object a line; by the worker."""
        return self._own / "metrics.jsonl"

    @property
    def error_path(self) -> Path:
        """Why the worker failed; by the worker."""
        return self._own / "error.json"

    @property
    def cancel_path(self) -> Path:
        """There once somebody asked redco-flow to cancel the job; by whoever asked."""
        return self.path / "cancel.json"

    @property
    def exit_path(self) -> Path:
        """How the job ended; by the job's last act, or by who learns that it had none."""
        return self.path / "exit.json"

    @property
    def result_path(self) -> Path:
        """The outputs' artifact ids; by the worker, last."""
        return self._own / "result.json"

    def rank_exit_path(self, rank: int) -> Path:
        """How one rank of a job with several ended; by its own supervisor."""
        return self.rank_directory(rank) / "exit.json"

    def rank_directory(self, rank: int) -> Path:
        """Where one rank's own files are."""
        return self.path / "ranks" / str(rank)

    @property
    def logs(self) -> Path:
        """The folder of the ranks' logs; made by the supervisor."""
        return self.path / "logs"

    @property
    def _own(self) -> Path:
        return self.path if self.rank == 0 else self.rank_directory(self.rank)

    def log_path(self, rank: int = 0) -> Path:
        """Return the path of one rank's output, secrets blotted out; by the supervisor."""
        return self.logs / f"rank{rank}.log"

    def ranks_with_logs(self) -> list[int]:
        """Return the ranks whose processes have begun, ascending."""
        names = (path.stem.removeprefix("rank") for path in self.logs.glob("rank*.log"))
        return sorted(int(name) for name in names if name.isdigit())

    def read_call(self) -> dict[str, Any] | None:
        """Return call.json."""
        return cast("dict[str, Any] | None", read_json_if_present(self.call_path))

    def read_job(self) -> JobRecord | None:
        """Return job.json."""
        return cast("JobRecord | None", read_json_if_present(self.job_path))

    def read_progress(self) -> Progress | None:
        """Return progress.json."""
        return cast("Progress | None", read_json_if_present(self.progress_path))

    def read_error(self) -> ErrorRecord | None:
        """Return error.json."""
        return cast("ErrorRecord | None", read_json_if_present(self.error_path))

    def read_exit(self) -> ExitRecord | None:
        """Return exit.json."""
        return cast("ExitRecord | None", read_json_if_present(self.exit_path))

    def read_result(self) -> ResultRecord | None:
        """Return result.json."""
        return cast("ResultRecord | None", read_json_if_present(self.result_path))

    def read_metrics(self) -> Iterator[dict[str, Any]]:
        """Yield metrics.jsonl's records; none where the worker has written none."""
        if self.metrics_path.is_file():
            yield from read_json_lines(self.metrics_path)
