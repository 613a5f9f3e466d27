"""Read the rows of a JSON file that is one array of objects, element by element.

Only one element is in memory at a time; it may have MAX_LINE_BYTES characters.
"""

from __future__ import annotations

import codecs
import json
import re
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from redco_flow.engine.files import UnreadableFile
from redco_flow.stages.data.compression import open_text
from redco_flow.stages.data.rows import BadRow, FileRow, Rows
from redco_flow.stages.data.text_lines import MAX_LINE_BYTES

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
