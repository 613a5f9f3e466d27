"""A stage's log for a person: whole or its end, and followed over the stage's attempts."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from redco_flow.orchestrate.log_lines import LogTail, clean_line
from redco_flow.tracking.attempt import AttemptDirectory

_MAX_LINE_BYTES = 1 << 16


def log_of(attempt: AttemptDirectory, rank: int | None) -> Path:
    """Return the path of a rank's log, or a task's; None means the first that the attempt has."""
    if rank is None:  # an array that is tried again has only the tasks that are not done
        rank = int(attempt.tasks[0].path.name) if attempt.tasks else 0
    return attempt.log_path(rank)


def last_lines(path: Path, count: int | None = None) -> list[str]:
    """The log's lines, or its last `count`; a missing log has none."""
    try:
        with path.open("rb") as file:
            return list(deque(map(clean_line, _bounded_lines(file)), maxlen=count))
    except FileNotFoundError:
        return []


def _bounded_lines(file: BinaryIO) -> Iterator[bytes]:
    """Lines in bounded memory: what a line has beyond its first 64 KiB is passed over."""
    while line := file.readline(_MAX_LINE_BYTES):
        rest = line
        while rest and not rest.endswith(b"\n"):
            rest = file.readline(_MAX_LINE_BYTES)
        yield line.rstrip(b"\n")


class LogFollower:
    """The new lines of a stage's log, over the attempts that write it."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._tail: LogTail | None = None

    def new_lines(self, path: Path, *, is_last: bool = False) -> list[str]:
        """Whole lines written since the last call; with another path it begins anew.

        Args:
            path: where the log stands now.
            is_last: the stage has ended, so an unfinished last line is given too.
        """
        if self._tail is None or path != self._path:
            self._path, self._tail = path, LogTail(path)
        return self._tail.last_lines() if is_last else self._tail.new_lines()
