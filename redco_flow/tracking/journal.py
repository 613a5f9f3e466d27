"""The journal of a run: one JSON object per event and line, with a sequence number.

Only the process that holds the run's lease appends. A line without its newline was never
written: the process that continues the journal removes it. The time of day is for people only.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Required, TypedDict, cast

from redco_flow.errors import DamagedRecord
from redco_flow.records import open_no_link
from redco_flow.tracking.process_identity import Clock, utc_now
from redco_flow.tracking.typed_records import read_record_lines

_BLOCK_BYTES = 1 << 16


class EventRecord(TypedDict, total=False):
    """One line of a journal; further keys are the event's own."""

    seq: Required[int]
    time: Required[str]
    event: Required[str]


class Journal:
    """An append-only record of events; threads of one process may share it."""

    def __init__(self, path: str | os.PathLike[str], *, clock: Clock = utc_now) -> None:
        self.path = Path(path)
        self._clock = clock
        self._mutex = threading.Lock()
        self._last: int | None = None  # not read from the file yet

    def append(self, event: str, **fields: Any) -> dict[str, Any]:
        """Write one event durably and return its record.

        Args:
            event: what happened, a word or two with underscores.
            fields: anything JSON; `seq`, `time` and `event` are the journal's own.

        Raises:
            OSError: the disk is full or read-only; names the path, and the journal is as before.
            TypeError, ValueError: a field is not JSON, or has a name that is the journal's own.
        """
        if taken := {"seq", "time"} & set(fields):
            raise ValueError(f"event {event!r}: {sorted(taken)} are the journal's own fields")
        with self._mutex:
            if self._last is None:
                self._last = _continue_after(self.path)
            record = {"seq": self._last + 1, "time": self._clock(), "event": event, **fields}
            _append_durably(self.path, record)
            self._last += 1
        return record

    def read(self) -> Iterator[dict[str, Any]]:
        """Yield the records in order; none where nothing was written."""
        return read_journal(self.path)


def read_journal(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """Yield a journal's records in order, without a torn last line; any process may read.

    Raises:
        DamagedRecord: a line is damaged; names it.
    """
    if Path(path).is_file():
        yield from cast("Iterator[dict[str, Any]]", read_record_lines(Path(path), EventRecord))


def _continue_after(path: Path) -> int:
    """Cut a torn last line off and return the last whole line's sequence number, 0 if none."""
    try:
        with open(path, "rb+", opener=open_no_link) as file:
            end = _end_of_last_whole_line(file.fileno(), file.seek(0, os.SEEK_END))
            file.truncate(end)
            start = _end_of_last_whole_line(file.fileno(), end - 1) if end else 0
            line = os.pread(file.fileno(), end - start, start)
    except FileNotFoundError:
        return 0
    try:
        return int(json.loads(line)["seq"]) if line else 0
    except (ValueError, KeyError, TypeError) as error:
        problem = f"its last line is no event ({error})"
        raise DamagedRecord(path, problem, "Move it away: the run goes on without it.") from error


def _end_of_last_whole_line(descriptor: int, before: int) -> int:
    """The position after the last newline in the file's first `before` bytes; 0 without one."""
    while before > 0:
        start = max(0, before - _BLOCK_BYTES)
        newline = os.pread(descriptor, before - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        before = start
    return 0


def _append_durably(path: Path, record: dict[str, Any]) -> None:
    line = (json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n").encode()
    descriptor = open_no_link(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        size = os.fstat(descriptor).st_size
        try:
            # A nearly full disk takes part of a line without an error; the rest then fails.
            written = 0
            while written < len(line):
                written += os.write(descriptor, line[written:])
            os.fsync(descriptor)
        except OSError as error:
            os.ftruncate(descriptor, size)
            error.filename = str(path)
            raise
    finally:
        os.close(descriptor)
