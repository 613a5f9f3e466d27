"""Fetch or delete the files of finished attempts on hosts, and old code snapshots.

What is brought is what a host wrote while it was out of reach: checkpoints, from which the stage's
next attempt goes on; logs, metrics and records, which belong to the attempt that wrote them. What
came before is here already: of each log the rest alone comes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from redco_flow.errors import ArtifactError, RedcoFlowError, UsageError
from redco_flow.launch.call import Call, read_call
from redco_flow.launch.host_facts import CleanedHost
from redco_flow.launch.hosts.allocation import EXECUTOR, HostsRecord
from redco_flow.launch.hosts.code_snapshot import take_snapshot
from redco_flow.launch.hosts.config import Config
from redco_flow.launch.hosts.connection import HostConnection
from redco_flow.launch.hosts.file_sets import FileSet
from redco_flow.launch.hosts.follow import is_mirrored, write_record
from redco_flow.launch.hosts.inventory import Inventory, what_is_missing
from redco_flow.launch.hosts.ssh import HostRefused
from redco_flow.records import readable_digest
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
        await connection.open()
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
    """Return why each attempt must stay on the host, by its folder's name; "" if it need not."""
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


@dataclass(frozen=True)
class LeftAttempt:
    """An ended attempt that has a directory on a host.

    Args:
        attempt: its directory here.
        there: its directory on the host.
    """

    attempt: AttemptDirectory
    call: Call
    there: Path
    found: Inventory

    @property
    def run(self) -> str:
        """The name of the job's folder among the host's runs."""
        return self.there.parents[3].name

    def why_it_stays(self) -> str:
        """Read again which parts of it are not here; "" if all of them are."""
        workspace = Workspace(Path(self.call.workspace))
        return what_is_missing(self.found, workspace, self.attempt, self.call.fingerprint)


async def left_on(
    connection: HostConnection, attempts: Iterable[AttemptDirectory]
) -> list[LeftAttempt]:
    """Return what a host has of these attempts; what was on other hosts, or on none, has nothing.

    Raises:
        HostUnreachable, HostRefused: as `HostConnection.ask`.
    """
    places = {str(there): (one, call) for one, call, there in _places_on(connection, attempts)}
    if not places:
        return []
    asked = {there: call.fingerprint for there, (_, call) in places.items()}
    workspace = str(connection.workspace.root)
    answer = await connection.ask("left", workspace=workspace, attempts=asked)
    found = answer["attempts"].items()
    return [LeftAttempt(*places[there], Path(there), inventory) for there, inventory in found]


async def bring_home(connection: HostConnection, left: LeftAttempt) -> None:
    """Bring the rest of an attempt's logs and metrics, and its records as they were last.

    Raises:
        HostUnreachable: the connection broke.
        OSError: it cannot be written here; names the path.
    """
    for name, value in left.found["records"].items():
        if is_mirrored(name):
            write_record(left.attempt.path, name, value)
    for name, digest in left.found["digests"].items():
        here = left.attempt.path / name
        if is_mirrored(name) and not name.endswith(".json") and readable_digest(here) != digest:
            here.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(HostRefused):  # a file that cannot be read there stops no job
                await connection.pull_rest((left.there / name).as_posix(), here)


async def fetch_checkpoints(
    connection: HostConnection, workspace: Workspace, fingerprint: str
) -> None:
    """Bring the checkpoints that are newer than those here.

    Args:
        workspace: the launcher's.

    Raises:
        HostUnreachable: the connection broke.
        HostRefused: the host cannot list them.
        OSError: they cannot be written here; names the path.
    """
    work = workspace.work_directory(fingerprint).name
    answer = await connection.ask(
        "unfetched",
        workspace=str(connection.workspace.root),
        work=work,
        after=max(workspace.committed_steps(work), default=0),
    )
    for one in answer["sets"]:
        with contextlib.suppress(ArtifactError, HostRefused):  # damaged: another one serves
            await connection.pull([FileSet.from_json(one)], workspace)


def _places_on(
    connection: HostConnection, attempts: Iterable[AttemptDirectory]
) -> Iterator[tuple[AttemptDirectory, Call, Path]]:
    for attempt in attempts:
        with contextlib.suppress(UsageError, ValueError, KeyError):  # damaged: it is not followed
            record = attempt.read_job()
            if record is not None and record["executor"] == EXECUTOR:
                job, call = HostsRecord.from_json(record), read_call(attempt.call_path)
                if connection.label in job.hosts and not job.is_shared:
                    yield attempt, call, job.attempt_on(connection.workspace, call)
