"""Bring here what a stage's earlier attempts left on a host while nobody could reach it.

Checkpoints, from which the next attempt goes on; metrics and logs, which belong to the attempt
that wrote them, so that a training's history has the steps that were taken over. What came before
the silence is here already: of each file the rest alone comes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from redco_flow.errors import ArtifactError, UsageError
from redco_flow.launch.call import Call, read_call
from redco_flow.launch.hosts.file_sets import FileSet, committed_steps
from redco_flow.launch.hosts.record import EXECUTOR, HostsRecord
from redco_flow.launch.hosts.session import HostSession
from redco_flow.launch.hosts.ssh_connection import HostRefused
from redco_flow.tracking.attempt import AttemptDirectory
from redco_flow.tracking.workspace import Workspace


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


async def fetch_growth(session: HostSession, attempt: AttemptDirectory) -> None:
    """Bring the rest of the metrics and logs of all attempts before this one.

    Raises:
        HostUnreachable, HostRefused: as `HostSession.ask`.
        OSError: they cannot be written here; names the path.
    """
    targets = dict(_growing_files(session, attempt))
    sizes = {there: _size(here) for there, here in targets.items()}
    answer = await session.ask("grown", sizes=sizes) if sizes else {"grown": []}
    for there in targets.keys() & set(answer["grown"]):
        targets[there].parent.mkdir(exist_ok=True)
        with contextlib.suppress(HostRefused):  # a file that cannot be read there stops no job
            await session.pull_rest(there, targets[there])


def _growing_files(session: HostSession, attempt: AttemptDirectory) -> Iterator[tuple[str, Path]]:
    """Every growing file that an earlier attempt may have on the host, and its place here."""
    for number in range(1, attempt.number):
        earlier = AttemptDirectory(attempt.path.with_name(str(number)))
        with contextlib.suppress(UsageError, ValueError, KeyError):  # damaged: nobody follows it
            record = earlier.read_job()
            if record is not None and record["executor"] == EXECUTOR:
                job, call = HostsRecord.from_json(record), read_call(earlier.call_path)
                for name in _names(job, call, session.label):
                    there = job.attempt_on(session.workspace, call) / name
                    yield str(there), earlier.path / name


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
