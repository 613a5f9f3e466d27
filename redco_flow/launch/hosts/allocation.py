"""Choose free hosts for a job and take their leases, all that it needs or none; the job's record.

Waiting is the caller's: each try says who has what. Hosts of one group share a fabric.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from redco_flow.launch.call import Call, JobResources
from redco_flow.launch.hosts.code_snapshot import CodeSnapshot
from redco_flow.launch.hosts.config import Config, eligible_hosts
from redco_flow.launch.hosts.connection import HostConnection
from redco_flow.launch.hosts.ssh import HostRefused, HostUnreachable
from redco_flow.tracking.workspace import Workspace


@dataclass(frozen=True)
class Allocation:
    """The hosts that one try took, and why not the others.

    Args:
        connections: the hosts that were taken, open; empty if there were not enough.
        why_not: what keeps each other host from being used.
    """

    connections: list[HostConnection]
    why_not: dict[str, str]


async def allocate(
    settings: Config,
    resources: JobResources,
    owner: Mapping[str, Any],
    snapshot: CodeSnapshot,
) -> Allocation:
    """Try once to take as many hosts as the job needs.

    Raises:
        DoesNotFit: there will never be enough.
        HostRefused: too many hosts cannot be used at all; says why, each.
    """
    why_not: dict[str, str] = {}
    refused: set[str] = set()
    groups = eligible_hosts(settings, resources)
    for group in groups:
        connections = [HostConnection(host, settings, snapshot) for host in group]
        opened = await asyncio.gather(*(_open(one) for one in connections))
        usable = []
        for connection, problem in zip(connections, opened, strict=True):
            if problem is None:
                usable.append(connection)
                continue
            why_not[connection.label] = str(problem)
            if isinstance(problem, HostRefused):
                refused.add(connection.label)
        taken = await _take(usable, resources.num_hosts, owner, why_not)
        for connection in connections:
            if connection not in taken:
                connection.close()
        if taken:
            return Allocation(taken, why_not)
    if all(
        sum(host.label not in refused for host in group) < resources.num_hosts for group in groups
    ):
        raise HostRefused("; ".join(why_not[label] for label in sorted(refused)))
    return Allocation([], why_not)


async def _open(connection: HostConnection) -> HostRefused | HostUnreachable | None:
    try:
        await connection.open()
    except (HostRefused, HostUnreachable) as error:
        return error
    return None


async def _take(
    connections: Sequence[HostConnection],
    num_hosts: int,
    owner: Mapping[str, Any],
    why_not: dict[str, str],
) -> list[HostConnection]:
    """Take `num_hosts` leases, in order; release all where fewer are free."""
    taken: list[HostConnection] = []
    for connection in connections:
        if len(taken) == num_hosts:
            break
        try:
            answer = await connection.ask(
                "acquire", directory=connection.directory, owner=owner, uses=[connection.code]
            )
        except (HostRefused, HostUnreachable) as error:
            why_not[connection.label] = str(error)
            continue
        if answer["holder"]:
            why_not[connection.label] = f"used by {answer['holder']}"
        else:
            taken.append(connection)
    if len(taken) == num_hosts:
        return taken
    for connection in taken:
        await connection.ask("release", directory=connection.directory, owner=owner)
    return []


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
    settings: Config
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
        return cls(**(values | {"settings": Config.from_json(record["settings"])}))

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
