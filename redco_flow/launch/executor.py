"""Executors by name: submitit's interface, for stage calls instead of pickled functions.

`redco_flow.spec.executor` says what an executor's module holds; this is what it subclasses. No
executor in particular is known here: one is imported when it is asked for.
"""

from __future__ import annotations

import os
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypedDict, cast

from submitit.core import plugins
from submitit.core.core import DelayedJob, Executor, Job
from submitit.core.utils import DelayedSubmission

from redco_flow import search_path
from redco_flow.errors import StageFailed, UsageError
from redco_flow.launch.call import JobResources, read_call
from redco_flow.launch.config import ExecutorConfig
from redco_flow.launch.host_facts import CleanedHost, Finding
from redco_flow.launch.job import CallJob, JobStatus, StageCall, read_log_end
from redco_flow.launch.processes import ATTEMPT_VARIABLE, READY
from redco_flow.records import open_no_link
from redco_flow.spec.executor import find_executor
from redco_flow.spec.profile import Profile
from redco_flow.tracking.attempt import AttemptDirectory, JobRecord

__all__ = ["CallExecutor", "CallJob", "JobStatus", "make_executor", "reattach"]


class ExecutorSettings(TypedDict, total=False):
    """Settings of a profile that every executor takes, as arguments of `CallExecutor`."""

    environment: dict[str, str]
    stall_seconds: float
    grace_seconds: float
    node_directory: str | None


class LauncherJob(ABC):
    """A job of a cluster that drives a run in place of a process on this machine."""

    @property
    @abstractmethod
    def job_id(self) -> str:
        """Its id; "" where it is not known."""

    @abstractmethod
    def status(self) -> JobStatus:
        """Return its state: PENDING, RUNNING, or LOST once the cluster has it no more."""

    @abstractmethod
    def confirmed_status(self) -> JobStatus:
        """Return `status`; if that is LOST, wait until a later answer confirms it or does not.

        Raises:
            ClusterUnreachable: there is no later answer.
        """

    @abstractmethod
    def cancel(self) -> None:
        """Have the cluster end it; one that has ended already is left as it is.

        Raises:
            ClusterUnreachable: there is no answer; the job is not cancelled.
        """


class ExpectedStart(NamedTuple):
    """When a job would start.

    Args:
        time: in seconds since 1970.
        source: by what, for people.
    """

    time: float
    source: str


class Launch(NamedTuple):
    """The process of a run that is to be a job.

    Args:
        directory: where it starts.
        variables: that it gets besides this process's.
        log: gets its output.
        record_path: where the job's record is written, before it is submitted.
    """

    directory: Path
    variables: Mapping[str, str]
    log: Path
    record_path: Path


class CallExecutor(Executor):
    """A submitit executor that takes stage calls; `submit(function)` is refused.

    Args:
        folder: the workspace; jobs write into their attempts' directories.
        config: the executor's section of the profile.
        variables: the profile's environment, for executors whose jobs do not inherit this
            process's, and for `render`.
        environment: what jobs inherit; None means this process's.
        stall_seconds: a worker that reports no progress for so long is stopped.
        grace_seconds: what a worker has to save when it is asked to stop.
        node_directory: the profile's `staging.directory`, for `examine`.
    """

    def __init__(
        self,
        folder: Path | str,
        config: ExecutorConfig | None = None,
        *,
        variables: Mapping[str, str] | None = None,
        environment: Mapping[str, str] | None = None,
        stall_seconds: float = 1800.0,
        grace_seconds: float = 30.0,
        node_directory: str | None = None,
    ) -> None:
        super().__init__(
            folder, parameters={"stall_seconds": stall_seconds, "grace_seconds": grace_seconds}
        )
        self._config = config or ExecutorConfig()
        self._variables = dict(variables or {})
        self._environment = dict(os.environ if environment is None else environment)
        self._node_directory = node_directory

    @classmethod
    def affinity(cls) -> int:
        """Never chosen unasked."""
        return 0

    @classmethod
    def _valid_parameters(cls) -> set[str]:
        return {"stall_seconds", "grace_seconds"}

    def submit_call(self, attempt: AttemptDirectory) -> CallJob:
        """Submit the call in the attempt's call.json; inside `batch()`, at its end.

        Raises:
            UsageError: there is no call.json, or the attempt was submitted before.
            DoesNotFit: no job can ever get what the call asks for.
            StageFailed: the job could not be started; says why.
        """
        submission = StageCall(attempt)
        if self._delayed_batch is not None:
            job: DelayedJob[dict[str, Any]] = DelayedJob(self)
            self._delayed_batch.append((job, submission))
            return cast("CallJob", job)  # it becomes one when the batch is submitted
        return cast("CallJob", self._internal_process_submissions([submission])[0])

    def take_over(self, job: CallJob) -> None:
        """Have `job.status` submit what an earlier launcher of the run left unsubmitted.

        Args:
            job: of an attempt of a run whose lease this process holds.
        """

    def render(self, attempt: AttemptDirectory, title: str, resources: JobResources) -> str:
        """Return what `submit_call` would hand to a cluster; "" where there is none.

        Args:
            attempt: where its files would be; need not exist.
            title: run, stage and attempt, for people.

        Raises:
            UsageError: it cannot be submitted.
        """
        return ""

    def expected_start(
        self, attempt: AttemptDirectory, title: str, resources: JobResources
    ) -> ExpectedStart:
        """Return when the job of `render` would start if it was submitted now; nothing is.

        By the cluster, which knows the time limits of other jobs; their list is asked for once.

        Raises:
            UsageError: the executor's cluster does not say that, or the job cannot be submitted.
            StageFailed: the cluster would refuse it; has its words.
            ClusterUnreachable: it gave no answer, or one without a time.
        """
        raise UsageError(f"the executor {self.name()} does not say when a job would start.")

    def submit_launcher(
        self, folder: Path, title: str, words: Sequence[str], launch: Launch
    ) -> LauncherJob:
        """Submit the job that drives a run, which the cluster starts again until the run's end.

        Args:
            folder: of the job's own files; must not exist.
            title: for people.
            words: the module and its arguments; `--job-name NAME --job ID` is added.

        Raises:
            UsageError: the executor has no such jobs.
            StageFailed, ClusterUnreachable: it could not be submitted.
        """
        raise UsageError(f"jobs of the executor {self.name()} cannot drive a run.")

    def render_launcher(
        self, folder: Path, title: str, words: Sequence[str], launch: Launch
    ) -> str:
        """Return what `submit_launcher` would hand to the cluster; the arguments are the same.

        Raises:
            UsageError: it cannot be submitted.
        """
        raise UsageError(f"jobs of the executor {self.name()} cannot drive a run.")

    def supervisor_command(self, attempt: AttemptDirectory) -> list[str]:
        """Return what runs the attempt's call to its end, as one process in the foreground.

        It keeps the log, stops the worker on SIGTERM (at once on a second one), and writes
        exit.json. Its environment is `job_environment`'s.
        """
        walltime = read_call(attempt.call_path).resources.walltime_minutes
        return [
            *(sys.executable, "-P", "-m", "redco_flow.launch.supervisor", str(attempt.path)),
            *("--stall-seconds", str(self.parameters["stall_seconds"])),
            *("--grace-seconds", str(self.parameters["grace_seconds"])),
            *([] if walltime is None else ["--walltime-seconds", str(walltime * 60)]),
        ]

    def examine(self, gpus_per_host: int) -> Iterator[Finding]:
        """Check, in seconds, that jobs can be submitted and will find what they need.

        Yields one finding a check; leaves nothing in a queue.

        Args:
            gpus_per_host: the most that the profile's own defaults give a stage.
        """
        yield from ()

    def clean(self, *, dry_run: bool) -> list[CleanedHost]:
        """Delete what jobs left outside the workspace and no job needs, or only say what it is.

        Raises:
            UsageError: they leave nothing there.
        """
        raise UsageError(
            f"jobs of the executor {self.name()} leave nothing outside the workspace, so there is "
            f"nothing to clean; name a profile of hosts: redco-flow clean -p PROFILE."
        )

    def _internal_process_submissions(
        self, delayed_submissions: list[DelayedSubmission]
    ) -> list[Job[Any]]:
        calls = []
        for submission in delayed_submissions:
            if not isinstance(submission, StageCall):
                raise UsageError(
                    f"{submission.function!r} cannot be submitted: the {self.name()} executor "
                    f"runs stage calls (submit_call) and pickles no functions."
                )
            check_submittable(submission.attempt)
            self._config.check_fits(read_call(submission.attempt.call_path).resources)
            calls.append(submission)
        self._config.check_installed()
        return [self._submit(call.attempt) for call in calls]

    @abstractmethod
    def _submit(self, attempt: AttemptDirectory) -> CallJob:
        """Start the job."""

    def _start_detached(
        self, what: str, command: Sequence[str], attempt: AttemptDirectory, log: Path
    ) -> JobRecord:
        """Start what forks itself into the background; return the job.json that it has written.

        Args:
            what: is started, for the message.
            command: gets `--ready-fd N` at its end, where it writes READY once the job is there.

        Raises:
            StageFailed: it ended before; has the end of its log.
        """
        read_end, write_end = os.pipe()
        with open(log, "ab", opener=open_no_link) as output, os.fdopen(read_end, "rb") as ready:
            try:
                process = subprocess.Popen(
                    [*command, "--ready-fd", str(write_end)],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    pass_fds=[write_end],
                    start_new_session=True,
                    env=job_environment(self._environment, attempt),
                )
            finally:
                os.close(write_end)
            process.wait()
            is_ready = ready.read(len(READY)) == READY
        record = attempt.read_job()
        if not is_ready or record is None:
            raise StageFailed(
                f"{what} did not start {attempt.path}; {log} says:\n{read_log_end(log, 4096)}"
            )
        return record


class StageToRender(NamedTuple):
    """A stage as `render` takes it."""

    attempt: AttemptDirectory
    title: str
    resources: JobResources


class ChainingExecutor(CallExecutor):
    """An executor whose cluster itself starts a job once others have completed."""

    @abstractmethod
    def submit_call_after(
        self,
        attempt: AttemptDirectory,
        upstream: Sequence[CallJob],
        after_end: Sequence[CallJob] = (),
        then: Sequence[AttemptDirectory] = (),
    ) -> CallJob:
        """Submit a call that begins when all of `upstream` have completed, launcher or not.

        Once one of them fails, the cluster cancels the job.

        Args:
            after_end: jobs that must have ended before it begins, however they end.
            then: calls that the same job runs afterwards, each once the one before it has
                completed; each gets a job.json.

        Raises:
            UsageError: there is no call.json, or the attempt was submitted before.
            StageFailed: the job could not be submitted, or one of `upstream` never was; says why.
        """

    @abstractmethod
    def render_after(
        self,
        attempt: AttemptDirectory,
        title: str,
        resources: JobResources,
        upstream: Sequence[str],
        then: Sequence[StageToRender] = (),
    ) -> str:
        """Return what `submit_call_after` would hand to the cluster.

        Args:
            upstream: job ids, or what stands for them.
            then: stages that the same job runs afterwards.

        Raises:
            UsageError: it cannot be submitted.
        """

    @abstractmethod
    def submit_pack(
        self,
        folder: Path,
        title: str,
        attempts: Sequence[AttemptDirectory],
        upstream: Sequence[CallJob] = (),
        after_end: Sequence[CallJob] = (),
    ) -> CallJob:
        """Submit calls of several runs as one job, which runs them one after the other.

        Each call is followed and cancelled as a job of its own (`reattach` of its job.json). One
        that fails ends only those of the others that take from it.

        Args:
            folder: of the job's own files; must not exist.
            title: for people.
            attempts: a call comes after those that it takes from; each gets a job.json.
            upstream: jobs that must have completed before the first begins. Where one fails, the
                attempts are never submitted, as those that a job leaves over.
            after_end: jobs that must have ended before, for other reasons.

        Returns:
            The job as a whole. Where `is_unsubmitted`, its `status` submits it, and until then no
            call may be looked at.

        Raises:
            StageFailed, ClusterUnreachable: it could not be submitted; says why.
        """


def common_settings(profile: Profile, environment: Mapping[str, str]) -> ExecutorSettings:
    """Return what an executor's `make` hands on, whatever else that executor reads.

    Args:
        profile, environment: as `make_executor` got them.
    """
    return {
        "environment": {**environment, **profile.environment},
        "stall_seconds": profile.stall_timeout_minutes * 60,
        "grace_seconds": profile.grace_seconds,
        "node_directory": profile.staging.directory if profile.staging else None,
    }


def make_executor(profile: Profile, environment: Mapping[str, str]) -> CallExecutor:
    """Return the executor that the profile names, known to submitit under its own name too.

    Args:
        environment: the variables that jobs inherit; the profile's are added.

    Raises:
        UsageError: there is no such executor.
    """
    executor: CallExecutor = _find(profile.executor).make(profile, environment)
    known = cast("dict[str, type[Executor]]", plugins.get_executors())
    known[executor.name()] = type(executor)
    return executor


def make_chaining_executor(profile: Profile, environment: Mapping[str, str]) -> ChainingExecutor:
    """Return the executor that the profile names, if its cluster can start one job after another.

    Raises:
        UsageError: it cannot, or there is no such executor.
    """
    executor = make_executor(profile, environment)
    if not isinstance(executor, ChainingExecutor):
        raise UsageError(
            f"executor '{profile.executor}' of profile '{profile.name}' cannot have jobs wait for "
            f"each other (Slurm can): leave --ahead out. The run's launcher, which outlives the "
            f"terminal, then starts each stage."
        )
    return executor


def reattach(record: Mapping[str, Any]) -> CallJob:
    """Return the job of a job.json, from any process.

    Raises:
        UsageError: the record is not one, or its executor is not installed here.
    """
    try:
        job: CallJob = _find(str(record["executor"])).reattach(record)
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise UsageError(f"not a job record: {dict(record)!r} ({error!r}).") from error
    return job


def reattach_launcher(executor: str, record: Mapping[str, Any]) -> LauncherJob:
    """Return the job that drives a run, from any process.

    Args:
        executor: of the run's profile.

    Raises:
        UsageError: the record is not one, or the executor has no such jobs.
    """
    try:
        job: LauncherJob = _find(executor).reattach_launcher(record)
    except (KeyError, AttributeError) as error:
        raise UsageError(f"not a launcher's record: {dict(record)!r} ({error!r}).") from error
    return job


def check_submittable(attempt: AttemptDirectory) -> None:
    """Raise unless the attempt has a call and no job yet.

    Raises:
        UsageError: says which.
    """
    if not attempt.call_path.is_file():
        raise UsageError(f"{attempt.call_path}: there is no call to submit.")
    job = attempt.read_job()
    if job is not None:
        raise UsageError(
            f"{attempt.path} was submitted before, as job {job.get('job_id')}; follow that one, "
            f"or make a new attempt."
        )


def _find(name: str) -> Any:
    try:
        return find_executor(name)
    except ValueError as error:
        raise UsageError(str(error)) from error


def job_environment(environment: Mapping[str, str], attempt: AttemptDirectory) -> dict[str, str]:
    """Return a job's environment: it imports the same modules as the submitting process."""
    given = environment.get("PYTHONPATH", "").split(os.pathsep)
    own = search_path.variables()
    first = dict.fromkeys(path for path in [*given, *own["PYTHONPATH"].split(os.pathsep)] if path)
    return {
        **environment,
        **own,
        "PYTHONPATH": os.pathsep.join(first),
        ATTEMPT_VARIABLE: str(attempt.path),
    }
