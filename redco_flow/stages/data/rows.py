"""Read rows from data files: csv, tsv, jsonl, parquet, arrow. Streaming, in bounded memory.

One function per format: path in; rows as mappings with their line, or `BadRow`s, out.
"""

from __future__ import annotations

import codecs
import csv
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Self

import orjson

from redco_flow.errors import RedcoFlowError
from redco_flow.records import reading
from redco_flow.spec.bad_rows import OnBadRow, SkipLimit, allowed_bad_rows

MAX_LINE_BYTES = 16 << 20
_CHUNK_BYTES = 1 << 20


class BadLine(ValueError):
    """A line that is no text; reading can go on after it.

    Args:
        reason: a few words, the same for all lines with this fault.
        detail: what is wrong with this one.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


class TextLines:
    """Iterate over a UTF-8 file's lines, with line ends; a byte order mark at the start is dropped.

    `line` is the number of the line returned or raised last, from 1. `next()` raises `BadLine`
    for a line with NUL bytes, not in UTF-8, or longer than MAX_LINE_BYTES (never held in
    memory), and goes on with the following line when called again. A context manager.
    """

    def __init__(self, path: Path) -> None:
        self.line = 0
        self.is_last_whole = True
        self._path = path
        self._file: BinaryIO | None = None

    def __enter__(self) -> Self:
        self._file = self._path.open("rb")
        return self

    def __exit__(self, *exception: object) -> None:
        if self._file is not None:
            self._file.close()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> str:
        return self.text(self.next_bytes())

    def next_bytes(self) -> bytes:
        """Return the next line as it stands in the file.

        Raises:
            BadLine: it is longer than MAX_LINE_BYTES.
            StopIteration: there is none.
        """
        assert self._file is not None, "use TextLines in a with statement"
        raw = self._file.readline(MAX_LINE_BYTES + 1)
        if not raw:
            raise StopIteration
        self.line += 1
        if len(raw) > MAX_LINE_BYTES:
            num_bytes = len(raw) + self._skip_rest(raw)
            raise BadLine(
                "line too long", f"{num_bytes:,} bytes; at most {MAX_LINE_BYTES:,} are allowed"
            )
        self.is_last_whole = raw.endswith(b"\n")
        return raw.removeprefix(codecs.BOM_UTF8) if self.line == 1 else raw

    def text(self, raw: bytes) -> str:
        """Decode a line.

        Raises:
            BadLine: it has NUL bytes, or is not in UTF-8.
        """
        if b"\0" in raw:
            raise BadLine("NUL byte", f"at byte {raw.index(0) + 1} of the line; text has none")
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise BadLine("not UTF-8", f"byte {error.start + 1} of the line") from error

    def _skip_rest(self, raw: bytes) -> int:
        """Read past the end of an overlong line; returns the number of bytes passed."""
        assert self._file is not None
        passed = 0
        while raw and not raw.endswith(b"\n"):
            raw = self._file.readline(_CHUNK_BYTES)
            passed += len(raw)
        return passed


_NUM_SHOWN = 20


class BadRows(RedcoFlowError):
    """The data has rows that cannot be used and the pipeline does not allow to skip them."""


class DataChanged(RedcoFlowError):
    """A data file is not what the stage's fingerprint was made of."""


class NoRows(RedcoFlowError):
    """A split has no usable row."""


@dataclass(frozen=True)
class BadRow:
    """One row that cannot be used.

    Args:
        location: "file:line", or whatever names the row best.
        reason: a few words that several rows may share, for counting: "not JSON".
        detail: what is wrong with this one and what is allowed.
    """

    location: str
    reason: str
    detail: str

    def __str__(self) -> str:
        return f"{self.location}: {self.reason}{': ' if self.detail else ''}{self.detail}"


@dataclass
class BadRowLog:
    """Collects bad rows while all files are read; keeps the first few, counts the rest.

    Args:
        policy: of the pipeline; `raise_if_any` raises what it does not allow.
    """

    policy: OnBadRow
    first: list[BadRow] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, row: BadRow) -> None:
        """Count a bad row."""
        self.counts[row.reason] += 1
        if len(self.first) < _NUM_SHOWN:
            self.first.append(row)

    def joined(self, other: BadRowLog) -> BadRowLog:
        """Return a log of the rows of both."""
        first = [*self.first, *other.first][:_NUM_SHOWN]
        return BadRowLog(self.policy, first, self.counts + other.counts)

    def raise_if_any(self, num_rows: int) -> None:
        """Stop where the policy says so.

        Args:
            num_rows: that were read, good or bad.

        Raises:
            BadRows: there are more bad rows than the policy allows; shows the first 20.
        """
        total, allowed = self.counts.total(), allowed_bad_rows(self.policy, num_rows)
        if allowed is None or total <= allowed:
            return
        what = f"{total} bad row{'s' if total > 1 else ''} in the data"
        advice = "Fix them, or leave them out and count them with data.on_bad_row: skip."
        if isinstance(self.policy, SkipLimit):
            what = (
                f"{total} of {num_rows} rows are bad, and data.on_bad_row: {self.policy} allows "
                f"{allowed}"
            )
            advice = "Fix them, or raise the limit."
        # A status shows the first line alone: it says how many of what, and which is the first.
        first = f", the first {self.first[0]}" if self.first else ""
        others = "".join(f"\n  {row}" for row in self.first[1:])
        more = f"\n  … and {total - len(self.first)} more" if total > len(self.first) else ""
        raise BadRows(f"{what} ({reasons_text(self.counts)}){first}{others}{more}\n{advice}")


def reasons_text(counts: Mapping[str, int]) -> str:
    """Return how many rows there are of each reason, the commonest first."""
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{count} × {reason}" for reason, count in ranked)


def problem_of_field(fields: Mapping[str, Any], key: str) -> tuple[str, str] | None:
    """Say that a row lacks a field as (reason, detail), or None."""
    if key in fields:
        return None
    return f"no field '{key}'", f"its fields are {', '.join(map(str, fields)) or '(none)'}"


def problem_of_text(fields: Mapping[str, Any], key: str) -> tuple[str, str] | None:
    """Say what is wrong with one field of a row as (reason, detail), or None."""
    if problem := problem_of_field(fields, key):
        return problem
    value = fields[key]
    if not isinstance(value, str):
        return f"field '{key}' is not text", _kind_of(value)
    if not value or value.isspace():
        return f"field '{key}' is empty", ""
    if "\0" in value:
        return "NUL byte", f"in field '{key}'"
    if value.isascii():
        return None
    try:
        value.encode()
    except UnicodeEncodeError:
        return "half a surrogate pair", f"in field '{key}'"
    return None


def _kind_of(value: Any) -> str:
    if isinstance(value, list) and value and all(isinstance(turn, Mapping) for turn in value):
        return (
            f"it is a conversation of {len(value)} turns; write what a model is given and what it "
            "is to answer into fields of their own"
        )
    return f"it is {type(value).__name__}"


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
    location = f"{path}:{lines.line}"
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError: also a number of too many digits
        if not lines.is_last_whole:
            return BadRow(
                location, "not JSON", f"{error}; the file ends inside this line: truncated?"
            )
        return BadRow(location, "not JSON", str(error))
    if not isinstance(value, dict):
        return BadRow(location, "not a JSON object", f"it is a {type(value).__name__}")
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
