"""Submit stage calls through XManager: an experiment for each run, a work unit for each attempt.

The local backend runs them on this machine; the jobs outlive the process that submitted them.
Imports the library xmanager nowhere: the process that talks to it does.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from redco_flow.errors import StageFailed
from redco_flow.launch.call import JobResources
from redco_flow.launch.executor import (
    CallExecutor,
    common_settings,
)
from redco_flow.launch.host_facts import Finding
from redco_flow.launch.job import read_log_end
from redco_flow.launch.xmanager.config import Config
from redco_flow.launch.xmanager.doctor import examine_xmanager
from redco_flow.launch.xmanager.job import EXPERIMENT_LOG, XManagerJob
from redco_flow.launch.xmanager.work_unit import WorkUnit, render
from redco_flow.spec.profile import Profile
from redco_flow.tracking.attempt import AttemptDirectory


class XManagerExecutor(CallExecutor):
    """Runs each call as a work unit.

    Args:
        folder: the workspace.
        config: the profile's `xmanager:` section.
        variables: the profile's environment, shown by `render`.
        common: as `CallExecutor`.
    """

    job_class = XManagerJob
    _config: Config

    @classmethod
    def name(cls) -> str:
        """Return the name for submitit's AutoExecutor."""
        return "redco-xmanager"

    def examine(self, gpus_per_host: int) -> Iterator[Finding]:
        """Yield one finding a check: the library, and where its database stands."""
        yield from examine_xmanager()

    def render(self, attempt: AttemptDirectory, title: str, resources: JobResources) -> str:
        """Return the work unit as text.

        Raises:
            DoesNotFit: it asks for more than this machine.
        """
        unit = WorkUnit(
            attempt=attempt.path.absolute(),
            experiment=title.split()[0],
            resources=resources,
            rendezvous_seconds=self._config.rendezvous_seconds,
            stall_seconds=self.parameters["stall_seconds"],
            grace_seconds=self.parameters["grace_seconds"],
        )
        return render(unit, title, self._variables)

    def _submit(self, attempt: AttemptDirectory) -> XManagerJob:
        attempt = AttemptDirectory(attempt.path.absolute())
        attempt.logs.mkdir(exist_ok=True)
        log = attempt.path / EXPERIMENT_LOG
        is_ready = self._start_detached(self._command(attempt), attempt, log)
        record = attempt.read_job()
        if not is_ready or record is None:
            raise StageFailed(
                f"XManager did not start {attempt.path}; {log} says:\n{read_log_end(log, 4096)}"
            )
        return XManagerJob(attempt.path, record["job_id"], record=record)

    def _command(self, attempt: AttemptDirectory) -> list[str]:
        return [
            *(sys.executable, "-P", "-m", "redco_flow.launch.xmanager.experiment"),
            str(attempt.path),
            *("--rendezvous-seconds", str(self._config.rendezvous_seconds)),
            *("--stall-seconds", str(self.parameters["stall_seconds"])),
            *("--grace-seconds", str(self.parameters["grace_seconds"])),
        ]


def make(profile: Profile, environment: Mapping[str, str]) -> XManagerExecutor:
    """Return the executor for a profile."""
    common = common_settings(profile, environment)
    variables = profile.environment
    return XManagerExecutor(profile.workspace, profile.section, variables=variables, **common)


def reattach(record: Mapping[str, Any]) -> XManagerJob:
    """Return the job of a record, from any process.

    Raises:
        ValueError, KeyError: it is not such a job's record.
    """
    return XManagerJob(record["attempt"], record["job_id"], record=record)
