"""Bring here what earlier attempts left on a host while it could not be reached.

Checkpoints, from which the stage's next attempt goes on; metrics, logs and records, which belong
to the attempt that wrote them, so that a training's history has the steps that were taken over.
What came before the silence is here already: of each log the rest alone comes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from redco_flow.errors import ArtifactError, UsageError
from redco_flow.launch.call import Call, read_call
from redco_flow.launch.hosts.file_sets import FileSet, committed_steps
from redco_flow.launch.hosts.follow import is_mirrored, write_record
from redco_flow.launch.hosts.left_behind import BroughtHome, LeftBehind, is_record
from redco_flow.launch.hosts.placement import EXECUTOR, HostsRecord
from redco_flow.launch.hosts.session import HostSession
from redco_flow.launch.hosts.ssh import HostRefused
from redco_flow.records import digest_file, read_json_if_present
from redco_flow.tracking.attempt import AttemptDirectory
from redco_flow.tracking.locks import find_holder
from redco_flow.tracking.results import find_result
from redco_flow.tracking.run_directory import RunDirectory
from redco_flow.tracking.workspace import Workspace

_SECONDS_TO_SETTLE = 600.0


async def fetch_checkpoints(session: HostSession, workspace: Workspace, fingerprint: str) -> None:
    """Bring the checkpoints that are newer than those here.

    Args:
        workspace: the launcher's.

    Raises:
        HostUnreachable, HostRefused: as `HostSession.ask`.
        OSError: they cannot be written here; names the path.
    """
    work = workspace.work_directory(fingerprint).name
    answer = await session.ask(
        "unfetched",
        directory=session.directory,
        workspace=str(session.workspace.root),
        work=work,
        after=max(committed_steps(workspace, work), default=0),
    )
    with contextlib.suppress(ArtifactError):  # damaged: an earlier one serves
        await session.pull([FileSet.from_json(one) for one in answer["sets"]], workspace)


async def bring_home(
    session: HostSession, attempts: Iterable[AttemptDirectory], *, goes_on: bool
) -> None:
    """Bring what attempts that are not followed any more left in their directories on a host.

    Where all of it is here then, the host is told so, and may forget it once it is old; but not
    while the checkpoints that belong to it may still be wanted.

    Args:
        attempts: those that were on other hosts, or no hosts at all, are passed over.
        goes_on: the stage's next attempt takes over there what they made.

    Raises:
        HostUnreachable, HostRefused: as `HostSession.ask`.
        OSError: it cannot be written here; names the path.
    """
    earlier = dict(_earlier_on(session, attempts))
    if not earlier:
        return
    answer = await session.ask("left", directory=session.directory, attempts=list(earlier))
    left = answer["attempts"]
    for there, found in left.items():
        await _fetch(session, Path(there), earlier[there], found)
    homes = {
        there: await asyncio.to_thread(_at_home, earlier[there], found)
        for there, found in left.items()
    }
    done = {there: home for there, home in homes.items() if goes_on or home["has_result"]}
    if done:
        await session.ask(
            "settle_left", _SECONDS_TO_SETTLE, directory=session.directory, attempts=done
        )


@dataclass(frozen=True)
class _Earlier:
    """An earlier attempt.

    Args:
        attempt: its directory here.
        call: what it was told.
        growing: the growing files that are written on the host, by name.
    """

    attempt: AttemptDirectory
    call: Call
    growing: frozenset[str]


def attempts_before(attempt: AttemptDirectory) -> Iterator[AttemptDirectory]:
    """Yield a stage's attempts before this one."""
    for number in range(1, attempt.number):
        yield AttemptDirectory(attempt.path.with_name(str(number)))


def ended_attempts(workspace: Workspace) -> Iterator[AttemptDirectory]:
    """Yield each attempt that is known here to have ended, of runs without an orchestrator."""
    for run in sorted(workspace.runs.glob("[!.]*")):
        if find_holder(RunDirectory(run)) is None:
            for path in sorted(run.glob("stages/*/attempts/*/exit.json")):
                yield AttemptDirectory(path.parent)


def _earlier_on(
    session: HostSession, attempts: Iterable[AttemptDirectory]
) -> Iterator[tuple[str, _Earlier]]:
    """Every one of the attempts that may have something on the host, by its directory there."""
    for earlier in attempts:
        with contextlib.suppress(UsageError, ValueError, KeyError):  # damaged: it is not followed
            record = earlier.read_job()
            if record is not None and record["executor"] == EXECUTOR:
                job, call = HostsRecord.from_json(record), read_call(earlier.call_path)
                if names := frozenset(_names(job, call, session.label)):
                    there = job.attempt_on(session.workspace, call)
                    yield str(there), _Earlier(earlier, call, names)


async def _fetch(session: HostSession, there: Path, earlier: _Earlier, found: LeftBehind) -> None:
    """Bring the rest of one attempt's growing files, and its records as they were last."""
    for name in sorted(earlier.growing):
        here = earlier.attempt.path / name
        if found["sizes"].get(name, 0) > _size(here):
            here.parent.mkdir(exist_ok=True)
            with contextlib.suppress(HostRefused):  # a file that cannot be read there stops no job
                await session.pull_rest((there / name).as_posix(), here)
    for name, value in found["records"].items():
        if is_record(name):
            write_record(earlier.attempt.path, name, value)


def _at_home(earlier: _Earlier, found: LeftBehind) -> BroughtHome:
    """What is here, read anew, of what the host has."""
    attempt, workspace = earlier.attempt, Workspace(Path(earlier.call.workspace))
    growing = {name: attempt.path / name for name in found["sizes"] if is_mirrored(name)}
    digests = {name: digest_file(path) for name, path in growing.items() if path.is_file()}
    records = {name: attempt.path / name for name in found["records"] if is_record(name)}
    return {
        "digests": digests,
        "records": {name: read_json_if_present(path) for name, path in records.items()},
        "has_result": find_result(workspace, earlier.call.fingerprint) is not None,
    }


def _names(job: HostsRecord, call: Call, label: str) -> Iterator[str]:
    """The growing files of a job that are written on one host, unless they are written here."""
    if job.is_shared or label not in job.hosts:
        return
    first = job.hosts.index(label) * call.resources.processes_per_host
    for rank in range(first, first + call.resources.processes_per_host):
        yield f"logs/rank{rank}.log"
    if first == 0:
        yield "metrics.jsonl"


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
