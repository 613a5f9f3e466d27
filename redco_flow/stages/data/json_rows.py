"""Read rows from JSON: one object a line, or one array of objects."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson

from redco_flow.stages.data.json_array import is_array, read_array
from redco_flow.stages.data.rows import BadRow, FileRow, Rows
from redco_flow.stages.data.text_lines import BadLine, TextLines

_SEVERAL_LINES = (
    " (rows are one object a line, or one array of objects; `jq -c . FILE > FILE.jsonl` writes an "
    "object that has several lines into one)"
)
_PLAIN_TYPES = frozenset((str, int, bool, type(None)))


def read_json(path: Path) -> Rows:
    """Yield the objects of a file; of an array with their numbers for lines.

    Raises:
        UnreadableFile: an array that is not JSON up to its end.
    """
    yield from read_array(path) if is_array(path) else _read_lines(path)


def _read_lines(path: Path) -> Rows:
    has_rows = False
    with TextLines(path) as lines:
        while True:
            try:
                raw = lines.next_bytes()
                fields = _plain_object(raw)
                row = _json_row(path, lines, raw) if fields is None else FileRow(lines.line, fields)
                if isinstance(row, BadRow) and not has_rows and raw.lstrip().startswith(b"{"):
                    row = replace(row, detail=row.detail + _SEVERAL_LINES)
                has_rows = has_rows or row is not None
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
