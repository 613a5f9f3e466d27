"""Which things on this host are copies of what stands elsewhere, and when each was last used.

A thing is a folder or a file that comes and goes as a whole: an input, a stage's working
directory, a job's run directory. Its mark is an empty file at the same place under `copies/`; the
mark's own time is the last use. What has no mark may exist nowhere else.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from redco_flow.errors import UsageError
from redco_flow.launch.call import read_call
from redco_flow.launch.hosts import lease as host_lease
from redco_flow.launch.hosts.bootstrap import REMOVAL_LOCK
from redco_flow.launch.hosts.file_sets import FileSet
from redco_flow.tracking.attempt import AttemptDirectory
from redco_flow.tracking.locks import exclusive
from redco_flow.tracking.results import read_result
from redco_flow.tracking.workspace import SHORT_DIGITS, Workspace

_FOLDER = "copies"


class Copies:
    """The marks of one host.

    Args:
        directory: of this host; every thing lies below it.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def locked(self) -> AbstractContextManager[int]:
        """Keep everybody else from removing anything inside the `with`.

        Raises:
            OSError: the directory cannot be written; names the path.
        """
        return exclusive(self._directory / REMOVAL_LOCK)

    def mark(self, things: Iterable[Path]) -> None:
        """Note that these are copies, and used now.

        Raises:
            OSError: the disk is full or read-only; names the path.
        """
        for thing in things:
            mark = self._mark_of(thing)
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.touch()

    def note_use(self, things: Iterable[Path]) -> None:
        """Note that these are used now, as far as they are copies."""
        self.mark([thing for thing in things if self.is_copy(thing)])

    def revoke(self, things: Iterable[Path]) -> None:
        """Note that these are changed here from now on, or are gone."""
        for thing in things:
            self._mark_of(thing).unlink(missing_ok=True)

    def is_copy(self, thing: Path) -> bool:
        """Say whether all of it stands elsewhere too."""
        return self._mark_of(thing).exists()

    def last_used(self, thing: Path) -> float:
        """Return when a copy was last used, in seconds since 1970; 0 for what is none."""
        try:
            return self._mark_of(thing).stat().st_mtime
        except FileNotFoundError:
            return 0.0

    def _mark_of(self, thing: Path) -> Path:
        return self._directory / _FOLDER / thing.relative_to(self._directory)


def expect(copies: Copies, workspace: Workspace, sets: Iterable[FileSet]) -> None:
    """Mark what the launcher brings, or would bring if it were not here."""
    for one in sets:
        thing = one.thing(workspace)
        if one.kind == "checkpoint" and thing.exists():
            copies.note_use([thing])  # beside these there may be what was not fetched
        else:
            copies.mark([thing])


def settle(directory: Path, owner: Mapping[str, Any], attempt: AttemptDirectory) -> None:
    """Mark what the job made, unless another job goes on with it; what it read was used now.

    Args:
        directory: of this host.
        owner: as of its lease.

    Raises:
        OSError: the disk is full or read-only; names the path.
    """
    if not attempt.call_path.exists():
        return  # the directory was emptied
    copies = Copies(directory)
    workspace = Workspace(directory / "workspace")
    run, fingerprint = attempt.path.parents[3], read_call(attempt.call_path).fingerprint
    with copies.locked():
        copies.note_use(host_lease.uses_of(directory, owner))
        mark_made(copies, workspace, run, fingerprint)
        copies.mark([run])


def mark_made(copies: Copies, workspace: Workspace, run: Path, fingerprint: str) -> None:
    """Mark what a job made, unless another one that is no copy yet goes on with it.

    Args:
        copies: locked.
        run: the job's run directory.
    """
    others = (one for one in workspace.runs.iterdir() if one != run and not copies.is_copy(one))
    if not any(fingerprint in _fingerprints(other) for other in others):
        copies.mark(_made(workspace, fingerprint))


def take_back(directory: Path, workspace: Workspace, fingerprint: str) -> None:
    """Note that a job begins to change what earlier ones with its fingerprint have made."""
    Copies(directory).revoke(_own(workspace, fingerprint))


def _own(workspace: Workspace, fingerprint: str) -> Iterator[Path]:
    yield workspace.work_directory(fingerprint)
    yield workspace.results / f"{fingerprint}.json"


def _made(workspace: Workspace, fingerprint: str) -> Iterator[Path]:
    yield from _own(workspace, fingerprint)
    result = read_result(workspace, fingerprint)
    for artifact_id in result.outputs.values() if result is not None else ():
        yield from workspace.artifacts.glob(f"*/{artifact_id[:SHORT_DIGITS]}")


def _fingerprints(run: Path) -> Iterator[str]:
    for path in run.glob("stages/*/attempts/*/call.json"):
        with contextlib.suppress(UsageError):  # damaged: nothing runs by it
            yield read_call(path).fingerprint
