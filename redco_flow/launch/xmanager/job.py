"""One job that XManager's local backend runs: its state and its end from our own files.

XManager tells no state and stops nothing there; the ranks' records and their processes do.
"""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from redco_flow.errors import UsageError
from redco_flow.launch.call import JobResources
from redco_flow.launch.endings import ClusterWord, judge, read_endings, write_exit
from redco_flow.launch.hosts.ranks import runners_of, stop
from redco_flow.launch.job import CallJob, JobStatus, read_log_end, status_from_files
from redco_flow.launch.processes import RankInfo, kill_processes_of, processes_of
from redco_flow.tracking.attempt import AttemptDirectory, Cause, State
from redco_flow.tracking.process_identity import ProcessIdentity

EXPERIMENT_LOG = "logs/xmanager.log"
"""What XManager itself says, within the attempt's directory."""

_LOG_END_BYTES = 2000


def is_over(attempt: AttemptDirectory, num_processes: int) -> bool:
    """Say whether no rank runs any more, and none will start."""
    runners = dict(runners_of(attempt))
    if any(runner.is_alive() for runner in runners.values()):
        return False
    # A process that could start a rank carries the attempt's mark, as would the rank.
    return len(runners) == num_processes or not any(processes_of(attempt.path))


def write_ending(attempt: AttemptDirectory, num_processes: int) -> None:
    """Write exit.json of a job that is over, once."""
    if attempt.read_exit() is not None:
        return
    stranger = (Cause.CANCELLED, "it was stopped, not by redco-flow.")
    has_begun = any(runners_of(attempt))
    not_begun = (Cause.FAILED, f"no process was started; {_log_end(attempt)}")
    record = judge(
        read_endings(attempt, 0),
        num_processes,
        ClusterWord(stopped=stranger, unstarted=None if has_begun else not_begun),
        has_result=attempt.result_path.exists(),
        was_cancelled=attempt.cancel_path.exists(),
    )
    write_exit(attempt, record)


def _log_end(attempt: AttemptDirectory) -> str:
    path = attempt.path / EXPERIMENT_LOG
    if not path.exists():
        return "XManager wrote no log."
    return f"{path} says:\n{read_log_end(path, _LOG_END_BYTES)}"


_SECONDS_TO_DIE = 5.0  # longer only in an uninterruptible read of a dead file system
_SECONDS_BETWEEN_KILLS = 0.02


class XManagerJob(CallJob):
    """A work unit of this machine, found by the process that had XManager start it."""

    @cached_property
    def _launcher(self) -> ProcessIdentity:
        return ProcessIdentity.from_json(self._record["launcher"])

    def status(self) -> JobStatus:
        """Say what exit.json says, else what the process table says.

        Where no process is left that would write exit.json, this does.
        """
        if status := status_from_files(self.attempt):
            return status
        if not self._launcher.is_alive() and is_over(self.attempt, self._num_processes):
            write_ending(self.attempt, self._num_processes)
        if status := status_from_files(self.attempt):
            return status
        started = len(list(runners_of(self.attempt)))
        message = f"{started} of {self._num_processes} processes were started."
        return JobStatus(
            State.RUNNING if started else State.PENDING, message=message, source="process table"
        )

    def cancel(self, check: bool = True) -> None:  # noqa: FBT001, FBT002 (submitit's signature)
        """Ask every rank to stop; a second call kills at once.

        Before all ranks are there, nothing can be saved, and they are killed at once too. Of a
        job that has ended, kill what it left behind.

        Raises:
            UsageError: the job runs on another machine.
        """
        if self.done():
            kill_processes_of(self.attempt.path)
            return
        if self._launcher.host != os.uname().nodename:
            raise UsageError(f"job {self.job_id} runs on {self._launcher.host}; cancel it there.")
        again = self.attempt.cancel_path.exists()
        are_all_there = len(list(runners_of(self.attempt))) == self._num_processes
        at_once = again or not are_all_there
        stop(self.attempt, at_once=at_once)
        if at_once:
            self._kill_what_was_just_started()
        if check:
            self.wait()

    @property
    def records_may_be_late(self) -> bool:
        """Whether it runs on another host than this one."""
        return self._launcher.host != os.uname().nodename

    @property
    def _num_processes(self) -> int:
        return int(self._record["num_processes"])

    def _kill_what_was_just_started(self) -> None:
        """Kill until nothing is left: what starts others may do so while it is looked for."""
        deadline = time.monotonic() + _SECONDS_TO_DIE
        while kill_processes_of(self.attempt.path) and time.monotonic() < deadline:
            time.sleep(_SECONDS_BETWEEN_KILLS)


@dataclass(frozen=True)
class WorkUnit:
    """The work unit of one stage attempt: a job for each of its ranks.

    Args:
        attempt: its directory, absolute.
        experiment: the title of the run's experiment.
        rendezvous_seconds: how long the ranks wait for each other.
        stall_seconds, grace_seconds: as the executor has them.
    """

    attempt: Path
    experiment: str
    resources: JobResources
    rendezvous_seconds: int
    stall_seconds: float
    grace_seconds: float

    @property
    def rank_infos(self) -> list[RankInfo]:
        """The ranks, ascending."""
        num_processes = self.resources.num_processes
        return [
            RankInfo(
                rank=rank,
                num_processes=num_processes,
                local_rank=rank,
                processes_per_host=num_processes,
                gpus_per_host=self.resources.gpus_per_host,
                rendezvous_seconds=self.rendezvous_seconds,
            )
            for rank in range(num_processes)
        ]

    @property
    def arguments(self) -> list[str]:
        """Arguments of Python in every job; the rank is in its environment variables."""
        walltime = self.resources.walltime_minutes
        return [
            *("-P", "-m", "redco_flow.launch.xmanager.follow", str(self.attempt)),
            *("--stall-seconds", f"{self.stall_seconds:g}"),
            *("--grace-seconds", f"{self.grace_seconds:g}"),
            *([] if walltime is None else ["--walltime-seconds", str(walltime * 60)]),
        ]


def render(unit: WorkUnit, title: str, variables: Mapping[str, str]) -> str:
    """Return the work unit as text.

    Args:
        variables: the profile's environment.
    """
    return "\n".join(_lines(unit, title, variables)) + "\n"


def _lines(unit: WorkUnit, title: str, variables: Mapping[str, str]) -> Iterator[str]:
    yield f"# redco-flow: {' '.join(title.split())}"
    yield f"experiment {unit.experiment}, one work unit, backend local"
    for rank_info in unit.rank_infos:
        yield f"job rank{rank_info.rank}: {shlex.join(['python', *unit.arguments])}"
        yield from (f"  {name}={value}" for name, value in rank_info.to_environment().items())
    yield from (f"{name}={shlex.quote(value)}" for name, value in variables.items())
