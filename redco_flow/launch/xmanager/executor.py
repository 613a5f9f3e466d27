"""Submit stage calls through XManager: an experiment for each run, a work unit for each attempt.

The local backend runs them on this machine; the jobs outlive the process that submitted them.
Imports the library xmanager nowhere: the process that talks to it does.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from redco_flow.errors import UsageError
from redco_flow.launch.call import JobResources
from redco_flow.launch.executor import CallExecutor, common_settings
from redco_flow.launch.host_facts import Finding, installed_versions, output_of_python
from redco_flow.launch.xmanager.config import INSTALL, Config, require_xmanager
from redco_flow.launch.xmanager.job import EXPERIMENT_LOG, WorkUnit, XManagerJob, render
from redco_flow.spec.profile import Profile
from redco_flow.tracking.attempt import AttemptDirectory
from redco_flow.tracking.process_identity import ProcessIdentity

_NEEDED = ("xmanager", "kubernetes", "protobuf")
_IMPORT = (
    "from xmanager import xm, xm_local; xm.binary, xm_local.Local(), xm_local.create_experiment"
)


def examine_xmanager() -> Iterator[Finding]:
    """Yield one finding per check; without the library, only that it is missing."""
    try:
        require_xmanager()
    except UsageError as error:
        yield Finding("xmanager", False, str(error), "see above")
        return
    yield _check_library()
    yield _check_database()


def _check_library() -> Finding:
    """It is imported in a process of its own: it brings packages that this one does not want."""
    output = output_of_python("xmanager", _IMPORT, remedy=f"install it again: {INSTALL}")
    if isinstance(output, Finding):
        return output
    versions = (f"{name} {version}" for name, version in installed_versions(_NEEDED).items())
    return Finding("xmanager", True, ", ".join(versions))


def _check_database() -> Finding:
    folder = Path("~/.xmanager").expanduser()
    place = folder if folder.exists() else folder.parent
    can_write = os.access(place, os.W_OK | os.X_OK)
    detail = f"{folder} can be written" if can_write else f"{place} cannot be written"
    return Finding("xmanager's database", can_write, detail, f"make {folder} yours to write")


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
        record = self._start_detached("XManager", self._command(attempt), attempt, log)
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
    ProcessIdentity.from_json(record["launcher"])  # a bad one is refused here
    return XManagerJob(record["attempt"], record["job_id"], record=record)
