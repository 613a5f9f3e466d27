"""Which things on this host are copies of what stands elsewhere, and when each was last used.

A thing is a folder or a file that comes and goes as a whole: an input, a stage's working
directory, a job's run directory. Its mark is an empty file at the same place under `copies/`; the
mark's own time is the last use. What has no mark may exist nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path

from redco_flow.launch.hosts.bootstrap import REMOVAL_LOCK
from redco_flow.tracking.file_lock import exclusive

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
