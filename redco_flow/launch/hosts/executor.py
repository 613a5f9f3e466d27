"""Run stage calls on machines that are reached over SSH, without a scheduler.

Submitting writes job.json and starts the job's controller, which waits for hosts and does
everything else. A job whose machine dies is tried again by the orchestrator, on another one.
"""

from __future__ import annotations

import functools
import json
import os
import secrets
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from redco_flow.launch.call import JobResources
from redco_flow.launch.executor import CallExecutor, common_settings
from redco_flow.launch.host_facts import CleanedHost, Finding
from redco_flow.launch.hosts.allocation import HostsRecord
from redco_flow.launch.hosts.config import Config, eligible_hosts
from redco_flow.launch.hosts.controller import JobController
from redco_flow.launch.hosts.doctor import examine_hosts
from redco_flow.launch.hosts.earlier_attempts import clean_hosts
from redco_flow.launch.job import CallJob, JobStatus, status_from_files
from redco_flow.records import write_json
from redco_flow.spec.profile import Profile
from redco_flow.tracking.attempt import AttemptDirectory
from redco_flow.tracking.process_identity import utc_now


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
        yield from examine_hosts(self._config, self.folder)

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
