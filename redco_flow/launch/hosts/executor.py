"""Run stage calls on machines that are reached over SSH, without a scheduler.

Submitting writes job.json and starts the job's driver, which waits for hosts and does everything
else. A job whose machine dies is tried again by the orchestrator, on another one.
"""

from __future__ import annotations

import functools
import json
import os
import secrets
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

from redco_flow.launch.call import JobResources, read_call
from redco_flow.launch.executor import CallExecutor, ExecutorSettings, common_settings
from redco_flow.launch.hosts.driver import HostsDriver
from redco_flow.launch.hosts.placement import HostsRecord, eligible_hosts
from redco_flow.launch.job import CallJob, JobStatus, status_from_files
from redco_flow.records import write_json
from redco_flow.spec.executors import HostsSection
from redco_flow.tracking.attempt import AttemptDirectory
from redco_flow.tracking.process_identity import utc_now


class HostsJob(CallJob):
    """A job on one host or several."""

    def __init__(
        self,
        folder: Path | str,
        job_id: str,
        tasks: Sequence[int] = (0,),
        record: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(folder, job_id, tasks)
        self._record = dict(record or self.attempt.read_job() or {})

    def status(self) -> JobStatus:
        """Say what exit.json says, else what the driver last heard."""
        status = status_from_files(self.attempt)
        if status is not None:
            return status
        driver = driver_of(self.attempt.path)
        return driver.status if driver.is_alive else self._without_driver(driver)

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
        """Return what stands in job.json."""
        return dict(self.attempt.read_job() or self._record)

    def _without_driver(self, driver: RunningDriver) -> JobStatus:
        """The driver's thread has ended: by the job's end, or by an error of ours."""
        status = status_from_files(self.attempt)
        if status is not None:
            return status
        raise driver.error or RuntimeError("the job's driver ended without a word")


class RunningDriver:
    """A driver in its thread."""

    def __init__(self, driver: HostsDriver) -> None:
        self.error: BaseException | None = None
        self._driver = driver
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def status(self) -> JobStatus:
        """What the driver knows now."""
        return self._driver.status

    @property
    def is_alive(self) -> bool:
        """Whether it still drives."""
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._driver.run()
        except BaseException as error:  # noqa: BLE001 (raised in the thread that asks)
            self.error = error


@functools.cache
def driver_of(attempt: Path) -> RunningDriver:
    """Return the one driver of this process for a job, started now if it is new."""
    directory = AttemptDirectory(attempt)
    record = HostsRecord.from_json(directory.read_job() or {})
    return RunningDriver(HostsDriver(directory, record, dict(os.environ)))


class HostsExecutor(CallExecutor):
    """Starts each call on free hosts of the profile.

    Args:
        folder: the workspace on this machine.
        settings: the profile's `hosts:` section.
        variables: the profile's environment. Hosts get these and what the profile forwards.
        common: as `CallExecutor`.
    """

    job_class = HostsJob

    def __init__(
        self,
        folder: Path | str,
        settings: HostsSection,
        *,
        variables: Mapping[str, str],
        **common: Unpack[ExecutorSettings],
    ) -> None:
        super().__init__(folder, **common)
        self._settings = settings
        self._variables = dict(variables)

    @classmethod
    def name(cls) -> str:
        """Return the name for submitit's AutoExecutor."""
        return "redco-hosts"

    def render(self, attempt: AttemptDirectory, title: str, resources: JobResources) -> str:
        """Return what would be started, where, and with what.

        Raises:
            DoesNotFit: there are not so many hosts.
        """
        groups = eligible_hosts(self._settings, resources)
        lines = [
            f"# redco-flow: {' '.join(title.split())}",
            f"{resources.num_hosts} of these hosts, {resources.processes_per_host} processes each:",
        ]
        for host in (host for group in groups for host in group):
            user = f"{host.user}@" if host.user else ""
            jump = f" through {host.jump_host}" if host.jump_host else ""
            lines.append(f"  {user}{host.label}{jump}, {host.gpus} GPUs, in {host.directory}")
        lines.append(f"{self._settings.python} -P -m redco_flow.launch.hosts.ranks ATTEMPT")
        for name, value in self._variables.items():
            lines.append(f"  {name}={json.dumps(value)}")
        for name in self._settings.forward_environment:
            lines.append(f"  {name} from this machine's environment")
        return "\n".join(lines) + "\n"

    def _submit(self, attempt: AttemptDirectory) -> HostsJob:
        attempt = AttemptDirectory(attempt.path.absolute())
        eligible_hosts(self._settings, read_call(attempt.call_path).resources)
        record = HostsRecord(
            job_id=secrets.token_hex(6),
            attempt=str(attempt.path),
            settings=self._settings,
            environment=self._variables,
            stall_seconds=self.parameters["stall_seconds"],
            grace_seconds=self.parameters["grace_seconds"],
            submitted_at=utc_now(),
        )
        write_json(attempt.job_path, record.to_json())
        driver_of(attempt.path)
        return HostsJob(attempt.path, record.job_id, record=record.to_json())


def make(profile: Any, environment: Mapping[str, str]) -> HostsExecutor:
    """Return the executor for a profile."""
    common = common_settings(profile, environment)
    return HostsExecutor(profile.workspace, profile.hosts, variables=profile.environment, **common)


def reattach(record: Mapping[str, Any]) -> HostsJob:
    """Return the job of a record, from any process.

    Raises:
        KeyError: it is not such a job's record.
    """
    return HostsJob(record["attempt"], record["job_id"], record=record)
