"""Decide what this host may delete, and delete it.

A job's folder may go when its end and all its files are in the launcher's workspace and no lease
names it. What was copied here, or can be made again, may go when no lease names it. Everything
else stays.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from redco_flow.errors import UsageError
from redco_flow.launch.call import read_call
from redco_flow.launch.hosts import lease
from redco_flow.launch.hosts.bootstrap import REMOVAL_LOCK
from redco_flow.launch.hosts.ranks import runners_of
from redco_flow.tracking.attempt import AttemptDirectory
from redco_flow.tracking.locks import exclusive
from redco_flow.tracking.results import read_result
from redco_flow.tracking.workspace import SHORT_DIGITS, Workspace

_COPIES = {
    "artifact": "workspace/artifacts/*/[!.]*",
    "data": "workspace/cache/data/[!.]*",
    "programs": "workspace/cache/jax/[!.]*",
    "unpacked": "workspace/cache/assembling-*",
    "arrived": "incoming/[!.]*",
    "code": "code/*",
}
_TRASH = "deleting"
_IN_USE = "a running job uses it"
_OF_JOB = "a job that stays has made it, or goes on with it"
_RECENT = "it was written or asked for within the last hour"

# Code is shipped before there is a lease; an artifact is published before the result that names it.
_SECONDS_IN_USE = 3600.0


@dataclass(frozen=True)
class Item:
    """A file or directory that is deleted or kept as a whole.

    Args:
        kind: result, run, work, or a kind of copy.
        reason: why it stays; "" where it may go.
    """

    path: Path
    kind: str
    reason: str


def survey(
    directory: Path, jobs: Mapping[str, str], clock: Callable[[], float] = time.time
) -> list[Item]:
    """Return everything that may ever go, a result before the artifacts that it names.

    Args:
        directory: of this host.
        jobs: why a job's folder must stay for its launcher, "" where it need not, by the folder's
            name; where no launcher says so, it stays.

    Raises:
        WorkspaceError: a lease is damaged, so that it is not known what is in use.
    """
    named = lease.in_use(directory)
    workspace = Workspace(directory / "workspace")
    runs = [
        Item(path, "run", _why_run_stays(path, jobs, named))
        for path in _find(directory, "workspace/runs/[!.]*")
    ]
    kept = {one for run in runs if run.reason for one in _fingerprints(run.path)}
    works = {str(workspace.work_directory(one)) for one in kept} | named
    made = set(_outputs(workspace, kept))
    results = [
        Item(path, "result", _OF_JOB if path.stem in kept else "")
        for path in _find(directory, "workspace/results/*.json")
    ]
    work = [
        Item(path, "work", _OF_JOB if str(path) in works else "")
        for path in _find(directory, "workspace/work/[!.]*")
    ]
    copies = [
        Item(path, kind, _OF_JOB if path in made else _why_copy_stays(path, named, clock()))
        for kind, pattern in _COPIES.items()
        for path in _find(directory, pattern)
    ]
    return [*results, *runs, *work, *copies]


def delete(
    directory: Path,
    jobs: Mapping[str, str],
    *,
    with_copies: bool = True,
    clock: Callable[[], float] = time.time,
) -> list[Path]:
    """Delete what may go; return what could not be deleted whole, which is tried again next time.

    Args:
        jobs: as in `survey`.

    Raises:
        WorkspaceError: as `survey`.
        OSError: the directory cannot be written; names the path.
    """
    trash = directory / _TRASH
    # A job names what it needs in its lease, then looks under the same lock whether it is here.
    with exclusive(directory / REMOVAL_LOCK):
        trash.mkdir(exist_ok=True)
        for item in survey(directory, jobs, clock):
            if not item.reason and (with_copies or item.kind not in _COPIES):
                item.path.rename(trash / secrets.token_hex(8))
    for path in trash.iterdir():
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    return list(trash.iterdir())


def _why_run_stays(run: Path, jobs: Mapping[str, str], named: set[str]) -> str:
    attempts = [AttemptDirectory(path) for path in run.glob("stages/*/attempts/*")]
    runners = (runner for attempt in attempts for _, runner in runners_of(attempt))
    if str(run) in named or any(runner.is_alive() for runner in runners):
        return _IN_USE
    return jobs.get(run.name, "its end is not in the launcher's workspace")


def _why_copy_stays(path: Path, named: set[str], now: float) -> str:
    if str(path) in named:
        return _IN_USE
    with contextlib.suppress(FileNotFoundError):  # just moved by its owner
        return _RECENT if now - path.stat().st_mtime < _SECONDS_IN_USE else ""
    return _RECENT


def _fingerprints(run: Path) -> Iterator[str]:
    for path in run.glob("stages/*/attempts/*/call.json"):
        with contextlib.suppress(UsageError):  # damaged: nothing runs by it
            yield read_call(path).fingerprint


def _outputs(workspace: Workspace, fingerprints: set[str]) -> Iterator[Path]:
    for result in (read_result(workspace, one) for one in fingerprints):
        for artifact_id in result.outputs.values() if result is not None else ():
            yield from workspace.artifacts.glob(f"*/{artifact_id[:SHORT_DIGITS]}")


def _find(directory: Path, pattern: str) -> Iterator[Path]:
    """Return matching files without links, and without files reached only through a link."""
    root = os.path.realpath(directory)
    for path in sorted(directory.glob(pattern)):
        if os.path.realpath(path) == os.path.join(root, path.relative_to(directory)):
            yield path
