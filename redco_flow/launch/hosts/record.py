"""job.json of a job on hosts: all that any process needs to take it up again.

Holds no values that the profile forwards from the environment: those may be secrets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from redco_flow.launch.call import Call
from redco_flow.spec.hosts_section import HostsSection
from redco_flow.tracking.workspace import Workspace

EXECUTOR = "hosts"


@dataclass(frozen=True)
class HostsRecord:
    """One job.

    Args:
        job_id: unique in the world: the hosts know the job by it.
        attempt: its directory on the launcher's machine.
        settings: the profile's `hosts:` section.
        environment: the profile's variables.
        hosts: labels of the hosts that were taken, in the order of their ranks; empty before.
        is_shared: whether they see the workspace; meaningless before.
    """

    job_id: str
    attempt: str
    settings: HostsSection
    environment: dict[str, str]
    stall_seconds: float
    grace_seconds: float
    submitted_at: str
    hosts: list[str] = field(default_factory=list)
    is_shared: bool = False

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> HostsRecord:
        """Read what `to_json` made.

        Raises:
            KeyError, ValueError: it is no such record.
        """
        values = {one.name: record[one.name] for one in fields(cls)}
        return cls(**(values | {"settings": HostsSection.from_json(record["settings"])}))

    def attempt_on(self, workspace: Workspace, call: Call) -> Path:
        """Return the attempt's directory on a host.

        Args:
            workspace: the host's own.
        """
        if self.is_shared:
            return Path(self.attempt)
        # With the job's id: a host may serve workspaces that have runs of the same name.
        run = workspace.runs / f"{call.run}-{self.job_id}"
        return run / "stages" / call.stage / "attempts" / str(call.attempt)

    def to_json(self) -> dict[str, Any]:
        """Return the record, with the executor's name."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        settings = self.settings.model_dump(mode="json")
        return {"executor": EXECUTOR, **values, "settings": settings}
