"""Choose free hosts for a job and take their leases: all that it needs, or none.

Waiting is the caller's: each try says who has what. Hosts of one group share a fabric.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redco_flow.errors import DoesNotFit
from redco_flow.launch.call import JobResources
from redco_flow.launch.hosts.code_snapshot import CodeSnapshot
from redco_flow.launch.hosts.session import HostSession
from redco_flow.launch.hosts.ssh_connection import HostRefused, HostUnreachable
from redco_flow.spec.hosts_section import Host, HostsSection


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
