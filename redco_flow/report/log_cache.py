"""Records that jobs append while they run, for a page that is asked again every few seconds.

Each line is read once. Of a long log the extremes of each number are kept, so that its charts keep
every spike: reading it again costs what was appended, drawing it the same whatever its length.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from redco_flow.errors import DamagedRecord
from redco_flow.tracking.attempt import AttemptDirectory, SystemSample
from redco_flow.tracking.goodput import TimeParts, find_goodput
from redco_flow.tracking.run_directory import RunDirectory
from redco_flow.tracking.typed_records import read_appended_lines

_MAX_RECORDS = 6000
_NUM_BUCKETS = 300
_REST_FACTOR = 100.0  # of the seconds that the goodput took, before it is computed again


class LogCache:
    """The logs of one run; not for several threads at once."""

    def __init__(self) -> None:
        self._logs: dict[Path, _Log] = {}
        self._goodput: dict[str, tuple[float, TimeParts | None]] = {}

    def metrics(self, attempt: AttemptDirectory) -> Iterator[dict[str, Any]]:
        """Yield as `AttemptDirectory.read_metrics`, of a long log the extremes."""
        yield from self._log(attempt.metrics_path, dict[str, Any], "step").read()

    def system_metrics(self, attempt: AttemptDirectory) -> Iterator[SystemSample]:
        """Yield as `AttemptDirectory.read_system_metrics`, of a long log the extremes."""
        yield from self._log(attempt.system_metrics_path, SystemSample, "time").read()

    def goodput(self, run: RunDirectory, stage: str) -> TimeParts | None:
        """Return as `find_goodput`, computed seldom where it takes long."""
        due, found = self._goodput.get(stage, (0.0, None))
        begin = time.monotonic()
        if begin >= due:
            found = find_goodput(run, stage)
            end = time.monotonic()
            self._goodput[stage] = (end + _REST_FACTOR * (end - begin), found)
        return found

    def _log(self, path: Path, shape: type, x: str) -> _Log:
        return self._logs.setdefault(path, _Log(path, shape, x))


class _Log:
    """One file; `x` is the key that its charts have as x axis."""

    def __init__(self, path: Path, shape: type, x: str) -> None:
        self._path, self._shape, self._x = path, shape, x
        self._forget(0)

    def _forget(self, inode: int) -> None:
        self._inode, self._offset, self._limit = inode, 0, _MAX_RECORDS
        self._records: list[Any] = []

    def read(self) -> Iterator[Any]:
        """Yield the records.

        Raises:
            DamagedRecord: a line is damaged; after those before it.
        """
        try:
            status = os.stat(self._path)
        except FileNotFoundError:
            return
        if status.st_ino != self._inode or status.st_size < self._offset:
            self._forget(status.st_ino)
        damage = None
        found: Iterator[tuple[int, Any]]
        goes_on = self._shape is SystemSample
        found = read_appended_lines(self._path, self._shape, self._offset, goes_on=goes_on)
        try:
            for offset, record in found:
                self._offset = offset
                self._records.append(record)
                if len(self._records) > self._limit:
                    self._records = _thinned(self._records, self._x)
                    self._limit = max(_MAX_RECORDS, 2 * len(self._records))
        except DamagedRecord as error:
            damage = error
        yield from self._records
        if damage is not None:
            raise damage


def _thinned(records: list[Any], x: str) -> list[Any]:
    """Return the records with an extreme of their stretch of `x`, and those of no training."""
    xs = [record[x] for record in records if _is_plain(record, x)]
    if not xs:
        return records
    width = (max(xs) - min(xs)) / _NUM_BUCKETS or 1.0
    kept = set()

    def bucket(index: int) -> float:
        record = records[index]
        # The first records after a start say whether it resumed.
        is_start = not all(_is_plain(one, x) for one in records[max(0, index - 2) : index + 1])
        return -1 - index if is_start or index < 3 else record[x] // width

    for _, indices in groupby(range(len(records)), bucket):
        extremes: dict[Any, tuple[tuple[float, int], tuple[float, int]]] = {}
        for index in indices:
            for key, value in _numbers(records[index]):
                here = (value, index)
                low, high = extremes.get(key, (here, here))
                extremes[key] = (min(low, here), max(high, here))
        kept |= {index for pair in extremes.values() for _, index in pair}
    return [records[index] for index in sorted(kept)]


def _is_plain(record: Mapping[str, Any], x: str) -> bool:
    is_other = "metrics" in record or record.get("is_resumed") or record.get("kind") == "start"
    return not is_other and isinstance(record.get(x), int | float)


def _numbers(record: Mapping[str, Any], prefix: Any = ()) -> Iterator[tuple[Any, float]]:
    for key, value in record.items():
        if isinstance(value, list):  # of GPUs
            for index, one in enumerate(value):
                yield from _numbers(one, (key, index))
        elif isinstance(value, int | float) and math.isfinite(value):
            yield (*prefix, key), value
