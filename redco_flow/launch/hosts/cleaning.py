"""Have hosts delete jobs that are in this workspace, and copies that no job uses."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from pathlib import Path

from redco_flow.errors import RedcoFlowError
from redco_flow.launch.finding import CleanedHost
from redco_flow.launch.hosts.code_snapshot import take_snapshot
from redco_flow.launch.hosts.config import Config
from redco_flow.launch.hosts.connection import HostConnection
from redco_flow.launch.hosts.earlier_attempts import bring_home, left_on
from redco_flow.tracking.attempt import AttemptDirectory
from redco_flow.tracking.locks import find_holder
from redco_flow.tracking.run_directory import RunDirectory
from redco_flow.tracking.workspace import Workspace

_SECONDS_TO_CLEAN = 3600.0


def clean_hosts(config: Config, folder: str | Path, *, dry_run: bool) -> list[CleanedHost]:
    """Have every host of the profile delete what may go, or only say what is there.

    Args:
        folder: the workspace.

    Raises:
        UsageError: this process's code cannot be copied.
        WorkspaceError: the workspace cannot be written.
    """
    workspace, snapshot = Workspace.open(folder), take_snapshot()
    connections = [HostConnection(one, config, snapshot) for one in config.addresses]

    async def clean_all() -> list[CleanedHost]:
        asked = (_clean(one, workspace, dry_run=dry_run) for one in connections)
        return await asyncio.gather(*asked)

    return asyncio.run(clean_all())


async def delete_jobs(connection: HostConnection, attempts: Iterable[AttemptDirectory]) -> None:
    """Have a host delete what it has of these attempts, once all of that is here.

    Raises:
        HostUnreachable, HostRefused: as `HostConnection.ask`.
        OSError: what they left cannot be written here; names the path.
    """
    jobs = await _jobs(connection, attempts, fetch=True)
    asked = {"directory": connection.directory, "jobs": jobs}
    await connection.ask("delete_jobs", _SECONDS_TO_CLEAN, **asked)


async def _clean(connection: HostConnection, workspace: Workspace, *, dry_run: bool) -> CleanedHost:
    try:
        await connection.open(workspace.cache / "code")
        jobs = await _jobs(connection, _ended(workspace), fetch=not dry_run)
        asked = {"directory": connection.directory, "jobs": jobs, "dry_run": dry_run}
        found = await connection.ask("clean", _SECONDS_TO_CLEAN, **asked)
        items, stuck = found["items"], found["stuck"]
        return {"label": connection.label, "problem": "", "items": items, "stuck": stuck}
    except (RedcoFlowError, OSError) as error:
        return {"label": connection.label, "problem": str(error), "items": [], "stuck": []}
    finally:
        connection.close()


async def _jobs(
    connection: HostConnection, attempts: Iterable[AttemptDirectory], *, fetch: bool
) -> dict[str, str]:
    """Why each attempt must stay on the host, by its folder's name; "" where it need not."""
    left = await left_on(connection, attempts)
    for one in left if fetch else ():
        await bring_home(connection, one)
    return {one.run: await asyncio.to_thread(one.why_it_stays) for one in left}


def _ended(workspace: Workspace) -> Iterator[AttemptDirectory]:
    """Each attempt that is known here to have ended, of runs without an orchestrator."""
    for run in sorted(workspace.runs.glob("[!.]*")):
        if find_holder(RunDirectory(run)) is None:
            for path in sorted(run.glob("stages/*/attempts/*/exit.json")):
                yield AttemptDirectory(path.parent)
