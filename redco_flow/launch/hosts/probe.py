"""Ask every host of a profile what it is and whether it reaches the next one, all at once."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import Any

from redco_flow.errors import RedcoFlowError
from redco_flow.launch.hosts.code_snapshot import take_snapshot
from redco_flow.launch.hosts.session import HostSession
from redco_flow.launch.hosts.shared_folder import is_shared
from redco_flow.launch.hosts.ssh_connection import HostUnreachable
from redco_flow.spec.hosts_section import Host, HostsSection
from redco_flow.tracking.workspace import Workspace

_SECONDS_TO_LISTEN = 10.0


@dataclass(frozen=True)
class HostReport:
    """What was found on one host.

    Args:
        problem: why it cannot be used at all; "" where it can.
        found: as `host_probe.look_around`; empty where there is a problem.
        sees_workspace: under the same path.
        unreached: why it does not reach the next host; "" where it does, or is the only one.
    """

    host: Host
    problem: str = ""
    found: dict[str, Any] | None = None
    sees_workspace: bool = False
    unreached: str = ""


def probe_hosts(settings: HostsSection, workspace: Workspace) -> list[HostReport]:
    """Return one report for each host, in the profile's order.

    Raises:
        UsageError: this process's code cannot be copied.
        OSError: the workspace cannot be written; names the path.
    """
    return asyncio.run(_probe(settings, workspace))


async def _probe(settings: HostsSection, workspace: Workspace) -> list[HostReport]:
    snapshot = take_snapshot()
    sessions = [HostSession(host, settings, snapshot) for host in settings.addresses]
    try:
        reports = await asyncio.gather(*(_report(one, workspace) for one in sessions))
        usable = [index for index, report in enumerate(reports) if not report.problem]
        nexts = usable[1:] + usable[:1] if len(usable) > 1 else []
        for index, other in zip(usable, nexts, strict=False):
            unreached = await _try_port(sessions[index], sessions[other], reports[other])
            reports[index] = replace(reports[index], unreached=unreached)
    finally:
        for session in sessions:
            session.close()
    return list(reports)


async def _report(session: HostSession, workspace: Workspace) -> HostReport:
    try:
        await session.open(workspace.cache / "code")
        found = await session.ask("probe", directory=session.directory)
        return HostReport(session.host, "", found, await is_shared(workspace, [session]))
    except RedcoFlowError as error:
        return HostReport(session.host, str(error))


async def _try_port(session: HostSession, other: HostSession, report: HostReport) -> str:
    """Knock from one host at a free port of another."""
    assert report.found is not None
    addresses = [*report.found["addresses"], other.host.address]
    try:
        async with other.talk("listen") as talk:
            said = await talk.hear(_SECONDS_TO_LISTEN)
            if said is None:
                raise HostUnreachable(f"{other.label} opened no port.")
            answer = await session.ask("knock", addresses=addresses, port=said["port"])
            talk.say({})
    except RedcoFlowError as error:
        return str(error)
    return f"{other.label}: {answer['unreached']}" if answer["unreached"] else ""
