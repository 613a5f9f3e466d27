"""Check a profile's hosts over SSH: what each one is, has, sees and reaches. Nothing is started."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from redco_flow.errors import RedcoFlowError
from redco_flow.launch.host_facts import Finding, package_versions
from redco_flow.launch.hosts.code_snapshot import take_snapshot
from redco_flow.launch.hosts.config import Config, Host
from redco_flow.launch.hosts.connection import HostConnection, is_shared
from redco_flow.launch.hosts.ssh import HostUnreachable
from redco_flow.launch.node_disk import node_disk_finding
from redco_flow.launch.shared_files import SharedTrial, settle_locks, shared_trial
from redco_flow.tracking.workspace import Workspace

_SECONDS_TO_LISTEN = 10.0


@dataclass(frozen=True)
class HostReport:
    """The check results of one host.

    Args:
        problem: why it cannot be used at all; "" where it can.
        found: as `hosts.agent.look_around`; empty where there is a problem.
        sees_workspace: under the same path.
        flock: as `try_flock`, of a host that sees the workspace.
        unreached: why it does not reach the next host; "" where it does, or is the only one.
    """

    host: Host
    problem: str = ""
    found: dict[str, Any] | None = None
    sees_workspace: bool = False
    flock: str = ""
    unreached: str = ""


def probe_hosts(
    settings: Config, workspace: Workspace, trial: SharedTrial, asked: Mapping[str, Any]
) -> list[HostReport]:
    """Return one report for each host, in the profile's order.

    Args:
        trial: of the workspace, for the hosts that see it.
        asked: `node_directory`, the profile's `staging.directory`, and `variables` of jobs.

    Raises:
        UsageError: this process's code cannot be copied.
        OSError: the workspace cannot be written; names the path.
    """
    return asyncio.run(_probe(settings, workspace, trial, asked))


async def _probe(
    settings: Config, workspace: Workspace, trial: SharedTrial, asked: Mapping[str, Any]
) -> list[HostReport]:
    snapshot = take_snapshot()
    connections = [HostConnection(host, settings, snapshot) for host in settings.addresses]
    try:
        reports = await asyncio.gather(
            *(
                _report(one, workspace, trial, str(index), asked)
                for index, one in enumerate(connections)
            )
        )
        usable = [index for index, report in enumerate(reports) if not report.problem]
        nexts = usable[1:] + usable[:1] if len(usable) > 1 else []
        for index, other in zip(usable, nexts, strict=False):
            unreached = await _try_port(connections[index], connections[other], reports[other])
            reports[index] = replace(reports[index], unreached=unreached)
    finally:
        for connection in connections:
            connection.close()
    return list(reports)


async def _report(
    connection: HostConnection,
    workspace: Workspace,
    trial: SharedTrial,
    name: str,
    asked: Mapping[str, Any],
) -> HostReport:
    try:
        await connection.open()
        found = await connection.ask("probe", directory=connection.directory, **asked)
        if not await is_shared(workspace, [connection]):
            return HostReport(connection.host, "", found)
        answer = await connection.ask(
            "try_files", name=name, folder=str(trial.folder), lock=str(trial.lock)
        )
        trial.watch.note_written(name)
        await asyncio.to_thread(trial.watch.wait)
        return HostReport(connection.host, "", found, True, answer["flock"])
    except RedcoFlowError as error:
        return HostReport(connection.host, str(error))


async def _try_port(connection: HostConnection, other: HostConnection, report: HostReport) -> str:
    """Knock from one host at a free port of another."""
    assert report.found is not None
    addresses = [*report.found["addresses"], other.host.address]
    try:
        async with other.talk("listen") as talk:
            said = await talk.hear(_SECONDS_TO_LISTEN)
            if said is None:
                raise HostUnreachable(f"{other.label} opened no port.")
            answer = await connection.ask("knock", addresses=addresses, port=said["port"])
            talk.send({})
    except RedcoFlowError as error:
        return str(error)
    return f"{other.label}: {answer['unreached']}" if answer["unreached"] else ""


_MAX_SECONDS_OF_CLOCK_DIFFERENCE = 5.0
_MIN_FREE_GIB = 2.0


def examine_hosts(
    settings: Config,
    workspace: str | Path,
    node_directory: str | None,
    variables: Mapping[str, str],
) -> Iterator[Finding]:
    """Yield one finding per check; for hosts that cannot be used, why.

    Args:
        node_directory: the profile's `staging.directory`.
        variables: the profile's environment.
    """
    asked = {"node_directory": node_directory, "variables": dict(variables)}
    started_at = time.time()
    try:
        opened = Workspace.open(workspace)
        with shared_trial(
            opened, [str(index) for index in range(len(settings.addresses))]
        ) as trial:
            reports = probe_hosts(settings, opened, trial, asked)
    except (RedcoFlowError, OSError) as error:
        yield Finding("hosts", False, str(error), "mend that and try again")
        return
    ended_at = time.time()
    for report in reports:
        detail = report.problem or f"{_found(report)['node']}, its directory can be written"
        yield Finding(report.host.label, not report.problem, detail, "see above, hosts.addresses")
    usable = [report for report in reports if not report.problem]
    if usable:
        yield _check_packages(usable)
        yield _check_gpus(usable)
        yield _check_disks(usable)
        if node_directory is not None:
            yield node_disk_finding({one.host.label: _found(one)["node_disk"] for one in usable})
        yield _check_clocks(usable, started_at, ended_at)
        yield _check_names(usable)
        yield _check_ports(usable)
        yield _check_workspace(usable, settings)
        if sharing := {one.host.label: one.flock for one in usable if one.sees_workspace}:
            yield trial.watch.finding()
            yield settle_locks(opened, sharing)
        yield _say_holders(usable)


def _check_packages(reports: Sequence[HostReport]) -> Finding:
    here = package_versions()
    differing = [
        f"{name} {_found(one)['versions'].get(name)} on {one.host.label}, {version} here"
        for one in reports
        for name, version in here.items()
        if name != "redco-flow" and _found(one)["versions"].get(name) != version
    ]
    shown = "; ".join(differing) or ", ".join(f"{name} {version}" for name, version in here.items())
    remedy = "install the same versions for the interpreter that hosts.python names"
    return Finding("packages on the hosts", not differing, shown, remedy)


def _check_gpus(reports: Sequence[HostReport]) -> Finding:
    lacking = [
        f"{one.host.label} has {_found(one)['gpus'] or 0}, the profile says {one.host.gpus}"
        for one in reports
        if (_found(one)["gpus"] or 0) < one.host.gpus
    ]
    shown = ", ".join(f"{one.host.label}: {_found(one)['gpus'] or 0}" for one in reports)
    remedy = "correct `gpus`, or mend what `nvidia-smi` says there"
    return Finding("gpus", not lacking, "; ".join(lacking) or shown, remedy)


def _check_disks(reports: Sequence[HostReport]) -> Finding:
    full = [one.host.label for one in reports if _found(one)["free_gib"] < _MIN_FREE_GIB]
    shown = ", ".join(
        f"{one.host.label}: {_found(one)['free_gib']:.1f} GiB free, "
        f"{_found(one)['taken_gib']:.1f} GiB in {one.host.directory}"
        for one in reports
    )
    remedy = "free space there (`redco-flow clean -p PROFILE`), or choose another `directory`"
    return Finding("disks", not full, shown, remedy)


def _check_clocks(reports: Sequence[HostReport], earliest: float, latest: float) -> Finding:
    margin = _MAX_SECONDS_OF_CLOCK_DIFFERENCE
    wrong = [
        f"{one.host.label} by {_found(one)['time'] - latest:.0f} s"
        for one in reports
        if not earliest - margin <= _found(one)["time"] <= latest + margin
    ]
    return Finding("clock", not wrong, ", ".join(wrong) or "agrees", "have it run an NTP client")


def _check_names(reports: Sequence[HostReport]) -> Finding:
    wrong = [problem for one in reports if (problem := _found(one)["own_name"])]
    is_needed = len(reports) > 1
    return Finding(
        "host names",
        not (wrong and is_needed),
        "; ".join(wrong) or "resolve",
        "in /etc/hosts of each host, give its name its address and not 127.0.1.1",
    )


def _check_ports(reports: Sequence[HostReport]) -> Finding:
    deaf = [f"from {one.host.label}: {one.unreached}" for one in reports if one.unreached]
    return Finding(
        "ports between hosts",
        not deaf,
        "; ".join(deaf) or "reachable",
        "let the hosts reach each other at any TCP port",
    )


def _check_workspace(reports: Sequence[HostReport], settings: Config) -> Finding:
    blind = [one.host.label for one in reports if not one.sees_workspace]
    if settings.shared_workspace:
        return Finding(
            "shared workspace",
            not blind,
            f"not seen on {', '.join(blind)}" if blind else "seen by all hosts",
            "mount it there under the same path, or remove hosts.shared_workspace",
        )
    shown = "not shared: inputs and results are copied" if blind else "shared by all hosts"
    return Finding("workspace on the hosts", True, shown)


def _say_holders(reports: Sequence[HostReport]) -> Finding:
    held = [f"{one.host.label}: {holder}" for one in reports if (holder := _found(one)["holder"])]
    return Finding("in use", True, "; ".join(held) or "all hosts are free")


def _found(report: HostReport) -> dict[str, Any]:
    assert report.found is not None
    return report.found
