"""Read rows from JSON: one object a line, or one array of objects."""

from __future__ import annotations

import codecs
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import orjson

from redco_flow.engine.files import UnreadableFile
from redco_flow.stages.data.compression import open_text
from redco_flow.stages.data.rows import BadRow, FileRow, Rows
from redco_flow.stages.data.text_lines import MAX_LINE_BYTES, BadLine, TextLines

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


_CHUNK_BYTES = 1 << 16
_HEAD_BYTES = 4096
_SPACE = " \t\r\n"
_NOT_SPACE = re.compile(f"[^{_SPACE}]")


def is_array(path: Path) -> bool:
    """Tell whether the first character of a file that is not white space opens an array."""
    with open_text(path) as file:
        head = file.peek(_HEAD_BYTES).removeprefix(codecs.BOM_UTF8)
    return head.lstrip(_SPACE.encode()).startswith(b"[")


def read_array(path: Path) -> Rows:
    """Yield the objects of an array, with their numbers from 1.

    Raises:
        UnreadableFile: it is not JSON up to its end; names the row and the line.
    """
    with open_text(path) as file:
        elements = _Elements(path, file)
        elements.expect("[")
        if elements.next_character() != "]":
            while True:
                value = elements.value()
                number = elements.row
                if isinstance(value, dict):
                    yield FileRow(number, value)
                else:
                    detail = f"it is a {type(value).__name__}"
                    yield BadRow(f"{path}:{number}", "not a JSON object", detail)
                if elements.next_character() != ",":
                    break
                elements.expect(",")
        elements.expect("]")
        if elements.next_character():
            elements.refuse("text after the end of the array")


class _Elements:
    """The text of an array, read as far as its next element.

    Args:
        row: the number of the element that was read last.
    """

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.row = 0
        self._path, self._file = path, file
        self._bytes_to_text = codecs.getincrementaldecoder("utf-8-sig")()
        self._text, self._place, self._lines_before = "", 0, 0
        self._is_read = False
        self._decoder = json.JSONDecoder()

    def next_character(self) -> str:
        """Return the next character that is not white space; empty at the end of the file."""
        while True:
            text = self._text
            found = _NOT_SPACE.search(text, self._place)
            self._place = place = found.start() if found else len(text)
            if place < len(text) or not self._read_more():
                return text[place : place + 1]

    def expect(self, character: str) -> None:
        """Pass over a character."""
        found = self.next_character()
        if not found:
            self.refuse("the file ends before the array does: is it truncated?")
        if found != character:
            self.refuse(f"{character!r} should be here, not {found!r}")
        self._place += 1

    def value(self) -> Any:
        """Return the next element."""
        self.row += 1
        self.next_character()
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._place)
            except RecursionError:
                self.refuse("nested too deep")
            except ValueError as error:
                # Perhaps only the end of the element is missing so far.
                if not self._read_more():
                    self.refuse(str(getattr(error, "msg", error)))
                continue
            if end < len(self._text) or not self._read_more():  # a number may continue
                self._place = end
                return value

    def refuse(self, problem: str) -> NoReturn:
        """Raise an error that names the row and the line."""
        line = self._lines_before + self._text.count("\n", 0, self._place) + 1
        raise UnreadableFile(
            f"{self._path}: not JSON at row {self.row} of its array (line {line}): {problem}. The "
            "rows behind it cannot be read; a file with one object a line (.jsonl) has no such "
            "limit."
        )

    def _read_more(self) -> bool:
        """Read as much again as there is of this element; False at the end of the file."""
        if self._is_read:
            return False
        rest = self._text[self._place :]
        if len(rest) > MAX_LINE_BYTES:
            self.refuse(f"more than {MAX_LINE_BYTES:,} characters without the end of the row")
        content = self._file.read(max(_CHUNK_BYTES, len(rest)))
        self._is_read = not content
        try:
            more = self._bytes_to_text.decode(content, final=self._is_read)
        except UnicodeDecodeError:
            self.refuse("not UTF-8")
        self._lines_before += self._text.count("\n", 0, self._place)
        self._text, self._place = rest + more, 0
        return True
