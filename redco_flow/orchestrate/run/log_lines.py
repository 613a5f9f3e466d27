"""Read what a job's log gained since last time, in bounded memory and as clean lines.

A log may hold anything: 50 MB without a newline, progress bars drawn with carriage returns,
colours, bytes that are no text. What is shown is capped; the whole stays in the file.
"""

from __future__ import annotations

import os
from pathlib import Path

from redco_flow.terminal_text import without_codes

_MAX_BYTES_PER_READ = 1 << 20
_MAX_LINES_PER_READ = 200
_MAX_LINE_CHARACTERS = 2000


class LogTail:
    """One log file, followed from its beginning."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        self._path = path
        self._offset = offset
        self._rest = b""

    def new_lines(self) -> list[str]:
        """Return the whole lines that appeared since the last call."""
        return self._cap(self._split(self._read()))

    def last_lines(self) -> list[str]:
        """Return all that is left, an unfinished last line included; the job has ended."""
        lines: list[str] = []
        while data := self._read():
            lines += self._split(data)
        rest, self._rest = clean_line(self._rest), b""
        return self._cap([*lines, rest])

    def _split(self, data: bytes) -> list[str]:
        """The whole lines, clean; what follows the last newline waits for its own."""
        *whole, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _MAX_BYTES_PER_READ:
            whole, self._rest = [*whole, self._rest], b""
        return [clean_line(line) for line in whole]

    def _cap(self, lines: list[str]) -> list[str]:
        shown = [line for line in lines if line]
        if len(shown) <= _MAX_LINES_PER_READ:
            return shown
        left_out = len(shown) - _MAX_LINES_PER_READ
        note = f"[{left_out} lines are not shown here; all of them are in {self._path}]"
        return [note, *shown[-_MAX_LINES_PER_READ:]]

    def _read(self) -> bytes:
        """At most a bounded piece; a log that grows faster is skipped forward, never piled up."""
        try:
            with self._path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                if size - self._offset > 4 * _MAX_BYTES_PER_READ:
                    self._offset, self._rest = size - _MAX_BYTES_PER_READ, b""
                file.seek(self._offset)
                data = file.read(_MAX_BYTES_PER_READ)
        except FileNotFoundError:
            return b""
        self._offset += len(data)
        return data


def clean_line(raw: bytes) -> str:
    """Return a line as text: what a terminal would show of it, without its codes, capped."""
    text = raw.rstrip(b"\r").rpartition(b"\r")[2].decode("utf-8", errors="replace")
    text = without_codes(text).rstrip()
    if len(text) > _MAX_LINE_CHARACTERS:
        return f"{text[:_MAX_LINE_CHARACTERS]}… [{len(text)} characters]"
    return text
