"""Read a record and check its shape: what it needs, of the right types, or an error that says why.

Every record of a run, attempt, artifact, result or sweep comes through here. A record is damaged
by a disk or by hand, never by us: writers replace it in one rename.
"""

from __future__ import annotations

import io
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar, is_typeddict

from redco_flow.errors import DamagedRecord
from redco_flow.records import read_bytes

_T = TypeVar("_T")
_log = logging.getLogger(__name__)
_told: set[str] = set()


def read_record(
    path: str | os.PathLike[str], shape: type[_T], *, needs: Iterable[str] = (), remedy: str = ""
) -> _T:
    """Return a record of this shape.

    Args:
        shape: a TypedDict, whose record is returned as it stands, further keys included; or a
            dataclass, of which an instance is returned, further keys left out.
        needs: keys without which it is damaged, besides those that the shape requires.
        remedy: what to do if it is damaged.

    Raises:
        FileNotFoundError, NotADirectoryError: there is none.
        DamagedRecord: it cannot be read, is no JSON, or has another shape.
    """
    try:
        content = read_bytes(path)
    except (FileNotFoundError, NotADirectoryError):
        raise
    except (OSError, ValueError) as error:
        problem = f"it cannot be read: {getattr(error, 'strerror', None) or error}"
        raise DamagedRecord(path, problem, remedy) from error
    record = _parse(content, shape, path, remedy)
    missing = [key for key in needs if isinstance(record, dict) and key not in record]
    if missing:
        raise DamagedRecord(path, f"it lacks {', '.join(missing)}", remedy)
    return record


def find_record(
    path: str | os.PathLike[str], shape: type[_T], *, needs: Iterable[str] = (), remedy: str = ""
) -> _T | None:
    """Return a record of this shape, or None where there is no such file.

    Raises:
        DamagedRecord: as `read_record`.
    """
    try:
        return read_record(path, shape, needs=needs, remedy=remedy)
    except (FileNotFoundError, NotADirectoryError):
        return None


def read_record_lines(path: Path, shape: type[_T], *, goes_on: bool = False) -> Iterator[_T]:
    """Yield each whole line's record; a torn last line (a writer was killed) ends the file.

    Args:
        goes_on: yield the records after a damaged line too, and only then raise.

    Raises:
        FileNotFoundError: there is no such file.
        DamagedRecord: a line is no record of this shape; names file and line.
    """
    return (record for _, record in read_appended_lines(path, shape, 0, goes_on=goes_on))


def read_appended_lines(
    path: Path, shape: type[_T], begin: int, *, goes_on: bool = False
) -> Iterator[tuple[int, _T]]:
    """Yield as `read_record_lines` the records from a byte on, each with where the next begins.

    Raises:
        FileNotFoundError: there is no such file.
        DamagedRecord: a line is no record of this shape; names file and line.
    """
    first: DamagedRecord | None = None
    try:
        where = f"{path}, after byte {begin}, line " if begin else f"{path}:"
        for number, line in enumerate(io.BytesIO(read_bytes(path, begin)), 1):
            if not line.endswith(b"\n"):
                break
            begin += len(line)
            try:
                record = _parse(line, shape, f"{where}{number}", "")
            except DamagedRecord as damage:
                if not goes_on:
                    raise
                first = first or damage
                continue
            yield begin, record
    except FileNotFoundError:
        raise
    except OSError as error:
        raise DamagedRecord(path, f"it cannot be read: {error.strerror}") from error
    if first is not None:
        raise first


def check_shape(value: Any, shape: type[_T], where: str | os.PathLike[str], remedy: str = "") -> _T:
    """Return `value` as `read_record` returns a file's.

    Raises:
        DamagedRecord: it has another shape.
    """
    # Imported here: it takes a third of the time in which a help page appears.
    import msgspec

    try:
        checked = msgspec.convert(value, shape)
    except msgspec.ValidationError as error:
        raise DamagedRecord(where, _plain(str(error)), remedy) from error
    unchanged: _T = value
    return unchanged if is_typeddict(shape) else checked


def unless_damaged(read: Callable[[], _T]) -> _T | None:
    """Return what `read` does, or None where a record is damaged, which is said once a process."""
    try:
        return read()
    except DamagedRecord as damage:
        if str(damage) not in _told:
            _told.add(str(damage))
            _log.warning("%s It counts as not there.", damage)
        return None


def _parse(content: bytes, shape: type[_T], where: str | os.PathLike[str], remedy: str) -> _T:
    # Imported here: it takes a third of the time in which a help page appears.
    import msgspec

    try:
        try:
            value = msgspec.json.decode(content)
        except msgspec.DecodeError:  # it knows neither NaN nor Infinity, which metrics may be
            value = json.loads(content)
    except (ValueError, RecursionError) as error:
        problem = "it is empty" if not content.strip() else f"it is no JSON ({error})"
        raise DamagedRecord(where, problem, remedy) from error
    return check_shape(value, shape, where, remedy)


def _plain(message: str) -> str:
    """Msgspec's words, without its quotes: `Expected str, got int - at $.name`."""
    return message.replace("`", "")[:1].lower() + message.replace("`", "")[1:]
