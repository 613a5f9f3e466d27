"""Read rows from data files: csv, tsv, jsonl, parquet, arrow. Streaming, in bounded memory.

One function per format: path in; rows as mappings with their line, or `BadRow`s, out.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from redco_flow.records import reading
from redco_flow.stages.bad_rows import BadRow
from redco_flow.stages.text_lines import MAX_LINE_BYTES, BadLine, TextLines

_BATCH_ROWS = 1000
_ARROW_FILE_MAGIC = b"ARROW1"
_PLAIN_TYPES = frozenset((str, int, bool, type(None)))


class FileRow(NamedTuple):
    """One row as it stands in a file.

    Args:
        line: its line in a text file, its number from 1 elsewhere.
        fields: values by field name.
    """

    line: int
    fields: Mapping[str, Any]


Rows = Iterator[FileRow | BadRow]


def read_file(path: Path) -> Rows:
    """Yield the rows of one data file, in order.

    Raises:
        ValueError: the ending is unknown, or the file is no such file at all.
        OSError: it cannot be read.
    """
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise ValueError(
            f"{path}: unknown ending '{path.suffix}'; known: {', '.join(sorted(READERS))}."
        )
    yield from reader(path)


def _read_jsonl(path: Path) -> Rows:
    with TextLines(path) as lines:
        while True:
            try:
                raw = lines.next_bytes()
                fields = _plain_object(raw)
                row = _json_row(path, lines, raw) if fields is None else FileRow(lines.line, fields)
            except StopIteration:
                return
            except BadLine as error:
                row = BadRow(f"{path}:{lines.line}", error.reason, error.detail)
            if row is not None:
                yield row


def _plain_object(raw: bytes) -> dict[str, Any] | None:
    """Parse a line fast; None where `json` must say what it means, or what is wrong with it.

    orjson reads large integers as floats, and refuses NaN and half a surrogate pair.
    """
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return None
    is_plain = isinstance(value, dict) and _PLAIN_TYPES.issuperset(map(type, value.values()))
    return value if is_plain else None


def _json_row(path: Path, lines: TextLines, raw: bytes) -> FileRow | BadRow | None:
    """Parse a line; None where there is nothing in it."""
    text = lines.text(raw)
    if not text.strip():
        return None
    place = f"{path}:{lines.line}"
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError: also a number of too many digits
        if not lines.is_last_whole:
            return BadRow(place, "not JSON", f"{error}; the file ends inside this line: truncated?")
        return BadRow(place, "not JSON", str(error))
    if not isinstance(value, dict):
        return BadRow(place, "not a JSON object", f"it is a {type(value).__name__}")
    return FileRow(lines.line, value)


def _read_csv(path: Path, delimiter: str) -> Rows:
    csv.field_size_limit(MAX_LINE_BYTES)  # the default of 128 KiB refuses long documents
    with TextLines(path) as lines:
        rows = csv.reader(lines, delimiter=delimiter, strict=True)
        header: list[str] | None = None
        while True:
            line = lines.line + 1
            try:
                values = next(rows)
            except StopIteration:
                return
            except (BadLine, csv.Error) as error:
                yield _bad_csv_row(path, line, lines, error)
                continue
            if header is None:
                header = values
            elif len(values) == len(header):
                yield FileRow(line, dict(zip(header, values, strict=True)))
            elif values:
                detail = f"{len(values)}; the header has {len(header)}: {', '.join(header)}"
                yield BadRow(f"{path}:{line}", "wrong number of fields", detail)


def _bad_csv_row(path: Path, line: int, lines: TextLines, error: Exception) -> BadRow:
    if isinstance(error, BadLine):
        return BadRow(f"{path}:{lines.line}", error.reason, error.detail)
    detail = str(error)
    if "end of data" in detail:
        detail = f"the quote that opens in this row is never closed (the file ends at {lines.line})"
    return BadRow(f"{path}:{line}", "not CSV", detail)


def _read_parquet(path: Path) -> Rows:
    import pyarrow.parquet

    what = "a Parquet file"
    with ExitStack() as stack:
        with reading(path, what):
            file = stack.enter_context(pyarrow.parquet.ParquetFile(path))
            batches = file.iter_batches(batch_size=_BATCH_ROWS)
        yield from _rows_of(batches, path, what)


def _read_arrow(path: Path) -> Rows:
    import pyarrow as pa

    what = "an Arrow file"
    # Read, not mapped: a mapped file that is cut short while it is read ends the process.
    with pa.OSFile(str(path), "rb") as source:
        with reading(path, what):
            batches = _arrow_batches(source)
        yield from _rows_of(batches, path, what)


def _arrow_batches(source: Any) -> Iterator[Any]:
    """Open a stream of record batches, or a file of them."""
    import pyarrow as pa

    magic = source.read(len(_ARROW_FILE_MAGIC))
    source.seek(0)
    if magic != _ARROW_FILE_MAGIC:
        return iter(pa.ipc.open_stream(source))
    file = pa.ipc.open_file(source)
    return (file.get_batch(index) for index in range(file.num_record_batches))


def _rows_of(batches: Iterator[Any], path: Path, what: str) -> Iterator[FileRow]:
    """Yield the rows of record batches that are what they say.

    A batch of a damaged file may point anywhere in memory: nothing of it is looked at before.
    """
    line = 0
    while True:
        with reading(path, what):
            batch = next(batches, None)
            if batch is None:
                return
            batch.validate(full=True)
        for start in range(0, batch.num_rows, _BATCH_ROWS):
            with reading(path, what):
                rows = batch.slice(start, _BATCH_ROWS).to_pylist()
            for fields in rows:
                line += 1
                yield FileRow(line, fields)


READERS: Mapping[str, Callable[[Path], Rows]] = {
    ".csv": partial(_read_csv, delimiter=","),
    ".tsv": partial(_read_csv, delimiter="\t"),
    ".json": _read_jsonl,
    ".jsonl": _read_jsonl,
    ".ndjson": _read_jsonl,
    ".parquet": _read_parquet,
    ".arrow": _read_arrow,
}
