"""Run stage calls on machines that are reached over SSH, without a scheduler.

Submitting writes job.json and starts the job's driver, which waits for hosts and does everything
else. A job whose machine dies is tried again by the orchestrator, on another one.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Unpack

from redco_flow.launch.call import JobResources, read_call
from redco_flow.launch.executor import CallExecutor, ExecutorSettings, common_settings
from redco_flow.launch.hosts.job import HostsJob, driver_of
from redco_flow.launch.hosts.placement import eligible_hosts
from redco_flow.launch.hosts.record import HostsRecord
from redco_flow.records import write_json
from redco_flow.spec.hosts_section import HostsSection
from redco_flow.tracking.attempt import AttemptDirectory
from redco_flow.tracking.clock import utc_now


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
        lines.append(f"{self._settings.python} -P -m redco_flow.launch.hosts.rank ATTEMPT")
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
