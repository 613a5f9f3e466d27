"""Read a UTF-8 file, compressed or not, line by line, in bounded memory.

A line that is not text is an error, and reading continues with the next one.
"""

from __future__ import annotations

import codecs
from pathlib import Path
from typing import BinaryIO, Self

from redco_flow.engine.files import UnreadableFile
from redco_flow.stages.data.compression import open_text

MAX_LINE_BYTES = 16 << 20
MAX_BLANK_LINES = 100_000
"""One after the other: a small compressed file may have hundreds of millions."""

_CHUNK_BYTES = 1 << 20


class BadLine(ValueError):
    """A line that is not text; reading continues after it.

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
    memory), and continues with the following line when called again. A context manager.
    """

    def __init__(self, path: Path) -> None:
        self.line = 0
        self.is_last_whole = True
        self._num_blank = 0
        self._path = path
        self._file: BinaryIO | None = None

    def __enter__(self) -> Self:
        self._file = open_text(self._path)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._file is not None:
            self._file.close()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> str:
        return self.text(self.next_bytes())

    def next_bytes(self) -> bytes:
        """Return the next line as it is in the file.

        Raises:
            BadLine: it is longer than MAX_LINE_BYTES.
            UnreadableFile: it is one of more than MAX_BLANK_LINES blank lines.
            StopIteration: the file has no more lines.
        """
        assert self._file is not None, "use TextLines in a with statement"
        raw = self._file.readline(MAX_LINE_BYTES + 1)
        if not raw:
            raise StopIteration
        self.line += 1
        self._num_blank = self._num_blank + 1 if raw.isspace() else 0
        if self._num_blank > MAX_BLANK_LINES:
            raise UnreadableFile(
                f"{self._path}:{self.line}: more than {MAX_BLANK_LINES:,} blank lines follow each "
                "other: remove them."
            )
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
