"""The job that drives a run in place of a process on this machine (`launcher:` of a profile).

launcher.json in the run's directory is the record of the job that is to drive the run, from its
submission until a process of another machine takes its place; `launcher/<n>/` has its script and
Slurm's output. Whether it drives the run now is said by the run's lease.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from redco_flow.errors import ClusterUnreachable, RedcoFlowError, UsageError
from redco_flow.orchestrate.run.state import LaunchRecord
from redco_flow.tracking.attempt import ENDED_RUN_STATES
from redco_flow.tracking.run_directory import RunDirectory
from redco_flow.tracking.typed_records import find_record

if TYPE_CHECKING:
    from redco_flow.launch.executor import CallExecutor, Launch, LauncherJob


class LauncherStatus(NamedTuple):
    """The state of the job that is to drive a run.

    Args:
        name: of the job.
        message: its state, for people.
        has_ended: whether the cluster does not start it any more.
    """

    name: str
    message: str
    has_ended: bool

    def __str__(self) -> str:
        return f"{self.name} {self.message}"


def with_launcher(run: RunDirectory, launcher: str) -> LaunchRecord:
    """Return the run's record with another launcher.

    Raises:
        UsageError: the run's profile, or a stage's, cannot have this one.
    """
    from pydantic import ValidationError

    from redco_flow.spec.profile import Profile, stage_launcher_problem

    record = LaunchRecord.read(run)
    for stage, own in record.stage_profiles.items():
        if problem := stage_launcher_problem(launcher, own["executor"]):
            raise UsageError(f"--launcher {launcher}: stage '{stage}': {problem}.")
    profile = {**record.profile, "launcher": launcher}
    try:
        Profile.from_record(profile)
    except ValidationError as error:
        message = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise UsageError(f"--launcher {launcher}: {message}.") from error
    return replace(record, profile=profile)


def launcher_status(
    run: RunDirectory, *, asks_cluster: bool = True, confirms_end: bool = False
) -> LauncherStatus | None:
    """Return what became of the job that is to drive the run; None where that is no job.

    Args:
        asks_cluster: False: the record alone counts, and the job may have ended.
        confirms_end: of a job that has ended, wait for a second answer: one that is being queued
            again passes for ended meanwhile.

    Raises:
        ClusterUnreachable: there is no second answer.
    """
    record = find_record(_record_path(run), dict[str, Any])
    if record is None:
        return None
    name = f"job {record['job_id'] or record['job_name']}"
    if not asks_cluster:
        return LauncherStatus(name, "was submitted; `redco-flow status` asks the cluster", False)
    job = _job_of(run, record)
    status = job.confirmed_status() if confirms_end else job.status()
    return LauncherStatus(name, status.message, status.is_finished)


def process_words(run: RunDirectory, options: Sequence[str] = ()) -> list[str]:
    """Return the module that drives a run, and its arguments."""
    return ["redco_flow.orchestrate.run.orchestrator", str(run.path), *options]


def submit_launcher_job(run: RunDirectory, words: Sequence[str], record: LaunchRecord) -> None:
    """Submit the job that drives the run.

    Args:
        words: of `process_words`.

    Raises:
        RedcoFlowError: it was not submitted, or may not have been; says how to go on.
    """
    executor, title, folder, launch = _job_to_submit(run, record)
    try:
        executor.submit_launcher(folder, title, words, launch)
    except RedcoFlowError as error:
        raise type(error)(
            f"{_why_not_submitted(run, error)}, or drive the run by a process on this machine "
            f"(`redco-flow resume {run.id} --launcher local`)."
        ) from error


def _why_not_submitted(run: RunDirectory, error: RedcoFlowError) -> str:
    if _record_path(run).exists():
        return (
            f"the cluster gave no answer to the submission of the job that drives run {run.id}, "
            f"and may have accepted it: {error}\n`redco-flow status {run.id}` shows the job once "
            f"the cluster answers. If it is gone, submit it again (`redco-flow resume {run.id}`)"
        )
    is_refused = not isinstance(error, ClusterUnreachable)
    again = "correct the profile and start the run again" if is_refused else "submit it again"
    return (
        f"the job that drives run {run.id} was not submitted: {error}\nThe run's records are "
        f"written: {again} (`redco-flow {'run' if is_refused else f'resume {run.id}'}`)"
    )


def render_launcher_job(run: RunDirectory, record: LaunchRecord) -> str:
    """Return what would be submitted to drive a run, whose directory need not exist.

    Raises:
        UsageError: it cannot be submitted.
    """
    executor, title, folder, launch = _job_to_submit(run, record)
    return executor.render_launcher(folder, title, process_words(run), launch)


def _job_to_submit(
    run: RunDirectory, record: LaunchRecord
) -> tuple[CallExecutor, str, Path, Launch]:
    """Return the executor of the run's job, and the job's title, folder and process."""
    # Imported here: runs that a process of this machine drives never pay for it.
    from redco_flow.launch.executor import Launch, make_executor
    from redco_flow.spec.profile import Profile

    profile = Profile.from_record(record.profile)
    profile = profile.model_copy(update={"workspace": record.workspace})
    directory = Path(record.directory)
    folders = run.path / "launcher"
    number = len(list(folders.glob("*"))) + 1
    launch = Launch(
        directory if directory.is_dir() else run.path,
        record.variables,
        run.log_path,
        _record_path(run),
    )
    title = f"{run.id} launcher {number}"
    return make_executor(profile, os.environ), title, folders / str(number), launch


def give_up_launcher_job(run: RunDirectory) -> None:
    """Cancel the job that is to drive the run, if there is one.

    That of a run that has ended is left to send its notices; it drives the run no more.

    Raises:
        ClusterUnreachable: the cluster does not answer.
    """
    if (record := find_record(_record_path(run), dict[str, Any])) is not None:
        if run.read_state()["state"] not in ENDED_RUN_STATES:
            _job_of(run, record).cancel()
        _record_path(run).unlink(missing_ok=True)


def is_launcher_job(run: RunDirectory, name: str) -> bool:
    """Whether the job of this name is the one that is to drive the run: not one of before."""
    record = find_record(_record_path(run), dict[str, Any])
    return record is not None and record["job_name"] == name  # its id is recorded later


def _job_of(run: RunDirectory, record: Mapping[str, Any]) -> LauncherJob:
    return _reattached(str(LaunchRecord.read(run).profile["executor"]), tuple(record.items()))


@functools.lru_cache
def _reattached(executor: str, record: tuple[tuple[str, Any], ...]) -> LauncherJob:
    """One object for each job: it remembers what it has seen of it."""
    from redco_flow.launch.executor import reattach_launcher

    return reattach_launcher(executor, dict(record))


def _record_path(run: RunDirectory) -> Path:
    return run.path / "launcher.json"
