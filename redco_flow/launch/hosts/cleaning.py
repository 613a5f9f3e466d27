"""What lies on this host, what of it may go, and its removal: first out of sight, then for good.

A thing may go when it stands elsewhere too, no live lease names it, and it was last used long ago.
`python -P -m redco_flow.launch.hosts.cleaning DIRECTORY DAYS` removes what is old beside a job that
has just been started, with the time that is left.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from redco_flow.errors import RedcoFlowError
from redco_flow.launch.hosts import lease as host_lease
from redco_flow.launch.hosts.copies import Copies
from redco_flow.tracking.results import list_results
from redco_flow.tracking.workspace import SHORT_DIGITS, Workspace

SET_ASIDE = ".removing-"
"""Begins the name of what is being removed."""
SECONDS_PER_DAY = 86_400.0
Fate = Literal["old", "recent", "in use", "only copy"]


@dataclass(frozen=True)
class Leftover:
    """One thing on this host.

    Args:
        kind: result, run, work, artifact, data, programs (compiled), code, or unfinished.
        age_days: since its last use; since its last change where it is no copy.
        fate: only "old" may go; "only copy" is not known to stand anywhere else.
    """

    path: Path
    kind: str
    age_days: float
    fate: Fate


@dataclass(frozen=True)
class _Place:
    """Where things of one kind lie, below the host's directory.

    Args:
        is_replaceable: whether they can always be had again, so that they need no marks.
    """

    kind: str
    pattern: str
    is_replaceable: bool = False


_PLACES = (
    _Place("result", "workspace/results/*.json"),  # first: none may outlive its artifacts
    _Place("run", "workspace/runs/[!.]*"),
    _Place("work", "workspace/work/[!.]*"),
    _Place("artifact", "workspace/artifacts/*/[!.]*"),
    _Place("data", "workspace/cache/data/[!.]*"),
    _Place("programs", "workspace/cache/jax/[!.]*", is_replaceable=True),
    _Place("code", "code/[!.]*", is_replaceable=True),
    _Place("unfinished", "code/.unpacking-*", is_replaceable=True),
    _Place("unfinished", "workspace/cache/assembling-*", is_replaceable=True),
    _Place("unfinished", "incoming/[!.]*", is_replaceable=True),
)


def look(
    directory: Path, keep_days: float, clock: Callable[[], float] = time.time
) -> list[Leftover]:
    """Return everything that may ever go, results first.

    Args:
        directory: of this host.
        keep_days: what was used within them is "recent".

    Raises:
        WorkspaceError: a lease cannot be read, so that it is not known what is in use.
    """
    return list(_Survey(directory, keep_days, clock()).leftovers())


def set_aside(directory: Path) -> Iterator[Path]:
    """Yield what is being removed, or was when the process that removed it died."""
    for folder in dict.fromkeys(Path(place.pattern).parent for place in _PLACES):
        yield from _things(directory, f"{folder}/{SET_ASIDE}*")


def num_bytes(path: Path) -> int:
    """Return the size of a file or a folder; a file of several names counts by its share."""
    try:
        found = os.lstat(path)
        if not stat.S_ISDIR(found.st_mode):
            return found.st_size // max(1, found.st_nlink)
        return sum(num_bytes(path / name) for name in os.listdir(path))
    except FileNotFoundError:
        return 0


class _Survey:
    """One look at a host."""

    def __init__(self, directory: Path, keep_days: float, now: float) -> None:
        self._directory = directory
        self._keep_days = keep_days
        self._now = now
        self._copies = Copies(directory)
        self._in_use = host_lease.in_use(directory)
        self._awaited = set(self._awaited_artifacts())

    def leftovers(self) -> Iterator[Leftover]:
        for place in _PLACES:
            for path in _things(self._directory, place.pattern):
                try:
                    age = (self._now - self._last_used(path)) / SECONDS_PER_DAY
                except FileNotFoundError:
                    continue  # its owner has just moved or removed it
                yield Leftover(path, place.kind, age, self._fate(place, path, age))

    def _fate(self, place: _Place, path: Path, age_days: float) -> Fate:
        if str(path) in self._in_use:
            return "in use"
        if path in self._awaited or not (place.is_replaceable or self._copies.is_copy(path)):
            return "only copy"
        return "old" if age_days >= self._keep_days else "recent"

    def _last_used(self, path: Path) -> float:
        found = os.lstat(path)
        # Programs are read and not changed; listing a folder would count as its use.
        read = 0.0 if stat.S_ISDIR(found.st_mode) else found.st_atime
        return max(found.st_mtime, read, self._copies.last_used(path))

    def _awaited_artifacts(self) -> Iterator[Path]:
        """What a result names that no launcher has copied yet."""
        workspace = Workspace(self._directory / "workspace")
        for result in list_results(workspace):
            if not self._copies.is_copy(workspace.results / f"{result.fingerprint}.json"):
                for artifact_id in result.outputs.values():
                    yield from workspace.artifacts.glob(f"*/{artifact_id[:SHORT_DIGITS]}")


def _things(directory: Path, pattern: str) -> Iterator[Path]:
    """What lies there, except links, and what only a link leads to."""
    root = os.path.realpath(directory)
    for path in sorted(directory.glob(pattern)):
        really = os.path.join(root, path.relative_to(directory))
        if os.path.realpath(path) == really:
            yield path


_LEAST_PRIORITY = 19


def clean(
    directory: Path, keep_days: float, clock: Callable[[], float] = time.time
) -> list[Leftover]:
    """Remove what is old; return it. What refuses to go stays out of sight (`set_aside`).

    Args:
        directory: of this host.
        keep_days: what was used within them stays.

    Raises:
        WorkspaceError: a lease cannot be read, so that it is not known what is in use.
        OSError: the directory cannot be written; names the path.
    """
    copies = Copies(directory)
    removed = []
    # A job that starts notes under the same lock what it uses: it is seen here, or sees it gone.
    with copies.locked():
        for leftover in look(directory, keep_days, clock):
            if leftover.fate == "old":
                _set_aside(leftover.path)
                copies.revoke([leftover.path])
                removed.append(leftover)
    for path in set_aside(directory):
        _remove(path)
    return removed


def start_cleaning(directory: Path, keep_days: int) -> None:
    """Clean in a process of its own, which is not waited for; 0 days is never."""
    if keep_days:
        subprocess.Popen(
            [sys.executable, "-P", "-m", __name__, str(directory), str(keep_days)],
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )


def main(arguments: list[str]) -> int:
    """Clean; what cannot be removed now is tried again beside the next job."""
    directory, keep_days = arguments
    os.nice(_LEAST_PRIORITY)
    with contextlib.suppress(RedcoFlowError, OSError):
        clean(Path(directory), float(keep_days))
    return 0


def _set_aside(path: Path) -> None:
    path.rename(path.parent / f"{SET_ASIDE}{secrets.token_hex(6)}")


def _remove(path: Path) -> None:
    """Remove it as far as possible; another process may be doing so too."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
