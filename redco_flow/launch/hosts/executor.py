"""Run stage calls on machines that are reached over SSH, without a scheduler.

Submitting writes job.json and starts the job's controller, which waits for hosts and does
everything else. A job whose machine dies is tried again by the orchestrator, on another one.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import secrets
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from redco_flow.errors import RedcoFlowError, RunCancelled
from redco_flow.launch.call import JobResources, read_call
from redco_flow.launch.endings import write_exit
from redco_flow.launch.executor import CallExecutor, common_settings
from redco_flow.launch.host_facts import CleanedHost, Finding
from redco_flow.launch.hosts.allocation import HostsRecord
from redco_flow.launch.hosts.config import Config, eligible_hosts
from redco_flow.launch.hosts.connection import HostConnection
from redco_flow.launch.hosts.doctor import examine_hosts
from redco_flow.launch.hosts.earlier_attempts import clean_hosts, delete_jobs
from redco_flow.launch.hosts.file_sets import FileSet
from redco_flow.launch.hosts.following import GroupFollowing, ending_of
from redco_flow.launch.hosts.ssh import HostUnreachable
from redco_flow.launch.hosts.start import JobStart, StartedJob
from redco_flow.launch.job import CallJob, JobStatus, status_from_files
from redco_flow.records import write_json
from redco_flow.spec.profile import Profile
from redco_flow.tracking.attempt import AttemptDirectory, Cause, ExitRecord, State
from redco_flow.tracking.process_identity import utc_now
from redco_flow.tracking.results import StageResult, publish_result


async def collect_result(connection: HostConnection, job: StartedJob) -> bool:
    """Copy the result of the job's fingerprint; return whether the host has one.

    Raises:
        HostUnreachable, HostRefused, ArtifactError, OSError: what is here by then is kept.
    """
    offered = await connection.ask(
        "offer", workspace=str(connection.workspace.root), fingerprint=job.call.fingerprint
    )
    if offered["result"] is None:
        return False
    await connection.pull([FileSet.from_json(one) for one in offered["sets"]], job.workspace)
    publish_result(job.workspace, StageResult(**offered["result"]))
    return True


_SECONDS_BETWEEN_TRIES = 3.0


def _last_known(attempt: AttemptDirectory, record: HostsRecord) -> JobStatus:
    """Return the state of a job from its files, before any host has answered."""
    if attempt.read_progress() is None:
        return JobStatus(State.PENDING, message="is being submitted.", source="job.json")
    message = f"runs on {', '.join(record.hosts)}, by what was last heard."
    return JobStatus(State.RUNNING, message=message, source="progress.json")


class JobController:
    """One job.

    Args:
        inherited: this process's environment, for the values that the profile forwards.
    """

    def __init__(
        self, attempt: AttemptDirectory, record: HostsRecord, inherited: Mapping[str, str]
    ) -> None:
        self.status = _last_known(attempt, record)
        self._attempt = attempt
        self._record = record
        self._inherited = inherited

    def run(self) -> None:
        """Return once exit.json is written and the hosts had time to delete what is here."""
        asyncio.run(self._drive())

    async def _drive(self) -> None:
        try:
            call = read_call(self._attempt.call_path)
            start = JobStart(self._attempt, call, self._record, self._inherited, self._tell)
            job = await start.start()
        except (RedcoFlowError, OSError) as error:
            cause = Cause.CANCELLED if isinstance(error, RunCancelled) else Cause.FAILED
            record = ExitRecord(exit_code=None, cause=cause, message=str(error))
            write_exit(self._attempt, record)
            return
        following = GroupFollowing(job, self._tell_running)
        fates = await following.until_ended()
        if has_collected := await self._has_collected(job):
            following.keep_result()
        write_exit(self._attempt, ending_of(job, fates))
        if has_collected and not job.record.is_shared:
            await self._delete(job)
        job.close()

    async def _has_collected(self, job: StartedJob) -> bool:
        """Bring the result here, if there is one; a full disk or a broken link only delays it."""
        connection = job.connections[0]
        while not job.record.is_shared:
            try:
                if not connection.is_open:
                    await connection.open()
                return await collect_result(connection, job)
            except (RedcoFlowError, OSError) as error:
                connection.close()
                if isinstance(error, HostUnreachable):
                    connection.note_silence()
                    if connection.is_lost(job.record.settings.lost_after_minutes * 60):
                        return False
                self._tell_running(f"has ended on {connection.label}; not copied yet: {error}")
            await asyncio.sleep(_SECONDS_BETWEEN_TRIES)
        return True

    async def _delete(self, job: StartedJob) -> None:
        """Have the hosts delete the stage's folders; a host that does not hear keeps them."""
        for connection in job.connections:
            with contextlib.suppress(RedcoFlowError, OSError):
                if not connection.is_open:
                    await connection.open()
                await connection.ask("release", directory=connection.directory, owner=job.owner)
                await delete_jobs(connection, job.attempts)

    def _tell(self, status: JobStatus) -> None:
        self.status = status

    def _tell_running(self, message: str) -> None:
        self.status = JobStatus(State.RUNNING, message=message, source="ssh", news=message)


class HostsJob(CallJob):
    """A job on one host or several."""

    def status(self) -> JobStatus:
        """Say what exit.json says, else what the controller last heard."""
        status = status_from_files(self.attempt)
        if status is not None:
            return status
        controller = controller_of(self.attempt.path)
        return controller.status if controller.is_alive else self._without_controller(controller)

    def cancel(self, check: bool = True) -> None:  # noqa: FBT001, FBT002 (submitit's signature)
        """Have every host stop its ranks, and kill them when their grace is over.

        A second call kills at once. A host that does not answer is asked when it does.
        """
        if not self.done():
            again = self.attempt.cancel_path.exists()
            write_json(self.attempt.cancel_path, {"time": utc_now(), "at_once": again})
        if check:
            self.wait()

    def record(self) -> dict[str, Any]:
        """Return the content of job.json."""
        return dict(self.attempt.read_job() or self._record)

    def _without_controller(self, controller: RunningController) -> JobStatus:
        """The controller's thread has ended: by the job's end, or by an error of ours."""
        status = status_from_files(self.attempt)
        if status is not None:
            return status
        raise controller.error or RuntimeError("the job's controller ended without a word")


class RunningController:
    """A controller in its thread."""

    def __init__(self, controller: JobController) -> None:
        self.error: BaseException | None = None
        self._controller = controller
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def status(self) -> JobStatus:
        """The state that the controller knows now."""
        return self._controller.status

    @property
    def is_alive(self) -> bool:
        """Whether its thread still runs."""
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._controller.run()
        except BaseException as error:  # noqa: BLE001 (raised in the thread that asks)
            self.error = error


@functools.cache
def controller_of(attempt: Path) -> RunningController:
    """Return the one controller of this process for a job, started now if it is new."""
    directory = AttemptDirectory(attempt)
    record = HostsRecord.from_json(directory.read_job() or {})
    return RunningController(JobController(directory, record, dict(os.environ)))


class HostsExecutor(CallExecutor):
    """Starts each call on free hosts of the profile.

    Args:
        folder: the workspace on this machine.
        config: the profile's `hosts:` section.
        variables: the profile's environment. Hosts get these and what the profile forwards.
        common: as `CallExecutor`.
    """

    job_class = HostsJob
    _config: Config

    @classmethod
    def name(cls) -> str:
        """Return the name for submitit's AutoExecutor."""
        return "redco-hosts"

    def examine(self, gpus_per_host: int) -> Iterator[Finding]:
        """Yield one finding a check: what each host is, has, sees and reaches."""
        yield from examine_hosts(self._config, self.folder, self._node_directory, self._variables)

    def clean(self, *, dry_run: bool) -> list[CleanedHost]:
        """Delete on every host what the workspace also has and no job uses."""
        return clean_hosts(self._config, self.folder, dry_run=dry_run)

    def render(self, attempt: AttemptDirectory, title: str, resources: JobResources) -> str:
        """Return what would be started, where, and with what.

        Raises:
            DoesNotFit: the profile has fewer hosts.
        """
        groups = eligible_hosts(self._config, resources)
        lines = [
            f"# redco-flow: {' '.join(title.split())}",
            f"{resources.num_hosts} of these hosts, {resources.processes_per_host} processes each:",
        ]
        for host in (host for group in groups for host in group):
            user = f"{host.user}@" if host.user else ""
            jump = f" through {host.jump_host}" if host.jump_host else ""
            lines.append(f"  {user}{host.label}{jump}, {host.gpus} GPUs, in {host.directory}")
        lines.append(f"{self._config.python} -P -m redco_flow.launch.hosts.ranks ATTEMPT")
        for name, value in self._variables.items():
            lines.append(f"  {name}={json.dumps(value)}")
        for name in self._config.forward_environment:
            lines.append(f"  {name} from this machine's environment")
        return "\n".join(lines) + "\n"

    def _submit(self, attempt: AttemptDirectory) -> HostsJob:
        attempt = AttemptDirectory(attempt.path.absolute())
        record = HostsRecord(
            job_id=secrets.token_hex(6),
            attempt=str(attempt.path),
            settings=self._config,
            environment=self._variables,
            stall_seconds=self.parameters["stall_seconds"],
            grace_seconds=self.parameters["grace_seconds"],
            submitted_at=utc_now(),
        )
        write_json(attempt.job_path, record.to_json())
        controller_of(attempt.path)
        return HostsJob(attempt.path, record.job_id, record=record.to_json())


def make(profile: Profile, environment: Mapping[str, str]) -> HostsExecutor:
    """Return the executor for a profile."""
    common = common_settings(profile, environment)
    return HostsExecutor(
        profile.workspace, profile.section, variables=profile.environment, **common
    )


def reattach(record: Mapping[str, Any]) -> HostsJob:
    """Return the job of a record, from any process.

    Raises:
        KeyError: it is not such a job's record.
    """
    return HostsJob(record["attempt"], record["job_id"], record=record)
