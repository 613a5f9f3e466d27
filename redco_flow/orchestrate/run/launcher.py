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

from pydantic import ValidationError

from redco_flow.errors import RedcoFlowError, StageFailed, UsageError
from redco_flow.orchestrate.run.state import LaunchRecord
from redco_flow.spec.profile import LOCAL_LAUNCHER, Profile, stage_launcher_problem
from redco_flow.tracking.run_directory import RunDirectory
from redco_flow.tracking.typed_records import find_record

if TYPE_CHECKING:
    from redco_flow.launch.executor import LauncherJob


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


def choose_launcher(run: RunDirectory, launcher: str) -> None:
    """Change which launcher the run has from now on, in its record.

    Raises:
        UsageError: the run's profile, or a stage's, cannot have this one.
    """
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
    replace(record, profile=profile).write(run)


def launcher_status(run: RunDirectory, *, asks_cluster: bool = True) -> LauncherStatus | None:
    """Return what became of the job that is to drive the run; None where that is no job.

    Args:
        asks_cluster: False: the record alone counts, and the job may have ended.
    """
    record = find_record(_record_path(run), dict[str, Any])
    if record is None:
        return None
    name = f"job {record['job_id'] or record['job_name']}"
    if not asks_cluster:
        return LauncherStatus(name, "by its record; `redco-flow status` asks the cluster", False)
    status = _job_of(run, record).status()
    return LauncherStatus(name, status.message, status.is_finished)


def submit_launcher_job(run: RunDirectory, words: Sequence[str], record: LaunchRecord) -> None:
    """Submit the job that drives the run.

    Args:
        words: the module and its arguments.

    Raises:
        RedcoFlowError: it was not submitted; says how to go on.
    """
    # Imported here: runs that a process of this machine drives never pay for it.
    from redco_flow.launch.executor import Launch, make_executor

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
    try:
        make_executor(profile, os.environ).submit_launcher(
            folders / str(number), f"{run.id} launcher {number}", words, launch
        )
    except RedcoFlowError as error:
        is_refused = isinstance(error, StageFailed)
        again = "correct the profile and start the run again" if is_refused else "submit it again"
        raise type(error)(
            f"the job that drives run {run.id} was not submitted: {error}\nThe run's records are "
            f"written: {again} (`redco-flow {'run' if is_refused else f'resume {run.id}'}`), or "
            f"drive it by a process on this machine (`redco-flow resume {run.id} --launcher "
            f"{LOCAL_LAUNCHER}`)."
        ) from error


def give_up_launcher_job(run: RunDirectory) -> None:
    """Cancel the job that is to drive the run, if there is one.

    Raises:
        ClusterUnreachable: the cluster does not answer.
    """
    if (record := find_record(_record_path(run), dict[str, Any])) is not None:
        _job_of(run, record).cancel()
        _record_path(run).unlink(missing_ok=True)


def _job_of(run: RunDirectory, record: Mapping[str, Any]) -> LauncherJob:
    return _reattached(str(LaunchRecord.read(run).profile["executor"]), tuple(record.items()))


@functools.lru_cache
def _reattached(executor: str, record: tuple[tuple[str, Any], ...]) -> LauncherJob:
    """One object for each job: it remembers what it has seen of it."""
    from redco_flow.launch.executor import reattach_launcher

    return reattach_launcher(executor, dict(record))


def _record_path(run: RunDirectory) -> Path:
    return run.path / "launcher.json"
