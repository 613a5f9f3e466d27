"""Choose free hosts for a job and take their leases, all that it needs or none; the job's record.

Waiting is the caller's: each try says who has what. Hosts of one group share a fabric.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from redco_flow.errors import DoesNotFit
from redco_flow.launch.call import Call, JobResources
from redco_flow.launch.hosts.code_snapshot import CodeSnapshot
from redco_flow.launch.hosts.session import HostSession
from redco_flow.launch.hosts.ssh import HostRefused, HostUnreachable
from redco_flow.spec.executors import Host, HostsSection
from redco_flow.tracking.workspace import Workspace


@dataclass(frozen=True)
class Placement:
    """The outcome of one try.

    Args:
        sessions: the hosts that were taken, open; empty if there were not enough.
        why_not: what keeps each other host from being used.
    """

    sessions: list[HostSession]
    why_not: dict[str, str]


def eligible_hosts(settings: HostsSection, resources: JobResources) -> list[list[Host]]:
    """Return the groups of hosts that are large enough, one for each fabric, best first.

    Raises:
        DoesNotFit: no group is, even when none is in use.
    """
    groups: dict[str | None, list[Host]] = {}
    for host in settings.addresses:
        if host.gpus >= resources.gpus_per_host:
            groups.setdefault(host.fabric, []).append(host)
    fitting = [group for group in groups.values() if len(group) >= resources.num_hosts]
    if not fitting:
        largest = max((len(group) for group in groups.values()), default=0)
        with_gpus = f" with {resources.gpus_per_host} GPUs" if resources.gpus_per_host else ""
        raise DoesNotFit(
            f"the stage asks for {resources.num_hosts} hosts{with_gpus}, and the profile's largest "
            f"group (hosts.addresses, one fabric) has {largest}: ask for less (resources), or add "
            f"hosts."
        )
    return fitting


async def place(
    settings: HostsSection,
    resources: JobResources,
    owner: Mapping[str, Any],
    snapshot: CodeSnapshot,
    cache: Path,
) -> Placement:
    """Try once to take as many hosts as the job needs.

    Raises:
        DoesNotFit: there will never be enough.
        HostRefused: too many hosts cannot be used at all; says why, each.
    """
    why_not: dict[str, str] = {}
    refused: set[str] = set()
    groups = eligible_hosts(settings, resources)
    for group in groups:
        sessions = [HostSession(host, settings, snapshot) for host in group]
        opened = await asyncio.gather(*(_open(one, cache) for one in sessions))
        usable = []
        for session, problem in zip(sessions, opened, strict=True):
            if problem is None:
                usable.append(session)
                continue
            why_not[session.label] = str(problem)
            if isinstance(problem, HostRefused):
                refused.add(session.label)
        taken = await _take(usable, resources.num_hosts, owner, why_not)
        for session in sessions:
            if session not in taken:
                session.close()
        if taken:
            return Placement(taken, why_not)
    if all(
        sum(host.label not in refused for host in group) < resources.num_hosts for group in groups
    ):
        raise HostRefused("; ".join(why_not[label] for label in sorted(refused)))
    return Placement([], why_not)


async def _open(session: HostSession, cache: Path) -> HostRefused | HostUnreachable | None:
    try:
        await session.open(cache)
    except (HostRefused, HostUnreachable) as error:
        return error
    return None


async def _take(
    sessions: Sequence[HostSession],
    num_hosts: int,
    owner: Mapping[str, Any],
    why_not: dict[str, str],
) -> list[HostSession]:
    """Take `num_hosts` leases, in order; give all back where there are not so many."""
    taken: list[HostSession] = []
    for session in sessions:
        if len(taken) == num_hosts:
            break
        try:
            answer = await session.ask("claim", directory=session.directory, owner=owner)
        except (HostRefused, HostUnreachable) as error:
            why_not[session.label] = str(error)
            continue
        if answer["holder"]:
            why_not[session.label] = f"used by {answer['holder']}"
        else:
            taken.append(session)
    if len(taken) == num_hosts:
        return taken
    for session in taken:
        await session.ask("release", directory=session.directory, owner=owner)
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
