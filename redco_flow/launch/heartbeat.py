"""The heartbeat of a job's ranks: supervisors write it, the process that follows the job reads it.

A rank's progress counts as well. Ages are measured by this machine's clock, from when a file was
seen to change: clocks of nodes may be wrong. Files are opened, not only looked at, so that a
network file system asks its server.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from redco_flow.records import open_no_link
from redco_flow.tracking.attempt import AttemptDirectory
from redco_flow.tracking.process_identity import utc_now

SECONDS_BETWEEN_BEATS = 30.0
_SECONDS_OF_LIFE = 2 * SECONDS_BETWEEN_BEATS
_MAX_CLOCK_ERROR_SECONDS = 600.0


def heartbeat_path(attempt: AttemptDirectory, rank: int) -> Path:
    """Return the path of a rank's heartbeat."""
    return attempt.rank_directory(rank) / "heartbeat"


def beat(path: Path) -> None:
    """Write that the rank lives; a full disk does not stop it."""
    with suppress(OSError), open(path, "w", encoding="utf-8", opener=open_no_link) as file:
        file.write(utc_now())


class HeartbeatWatch:
    """Whether a rank of an attempt lives, by its files."""

    def __init__(
        self, attempt: AttemptDirectory, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._attempt = attempt
        self._clock = clock
        self._seen: dict[Path, bytes] = {}
        self._changed_at = float("-inf")

    def is_alive(self) -> bool:
        """Whether a heartbeat or progress has changed within two intervals.

        The first look at a file counts as a change, unless the file is too old on any clock.
        """
        for path in self._files():
            with suppress(OSError):  # also ESTALE, of a file that its node has replaced
                with path.open("rb") as file:
                    content = file.read()
                    age = time.time() - os.fstat(file.fileno()).st_mtime
                is_new = path not in self._seen and age < _MAX_CLOCK_ERROR_SECONDS
                if is_new or self._seen.get(path, content) != content:
                    self._changed_at = self._clock()
                self._seen[path] = content
        return self._clock() - self._changed_at < _SECONDS_OF_LIFE

    def _files(self) -> list[Path]:
        return [self._attempt.progress_path, *self._attempt.path.glob("ranks/*/heartbeat")]
