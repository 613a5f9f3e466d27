"""Append a process's output to its log: secrets blotted out, any bytes, bounded memory.

Knows bytes, not lines. A log that cannot be written stops nothing: the output is dropped and
the reason kept, because a blocked pipe would hang the job.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from redco_flow.launch.redaction import Redactor
from redco_flow.writing import open_no_link

_TAIL_BYTES = 4096


class LogWriter:
    """One rank's log."""

    def __init__(self, path: Path, secrets: Iterable[bytes]) -> None:
        self.path = path
        self.tail = b""  # the last of what was shown
        self.problem: str | None = None
        self._redactor = Redactor(secrets)
        self._descriptor = open_no_link(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def write(self, chunk: bytes) -> None:
        """Append the process's next bytes."""
        self._append(self._redactor.feed(chunk))

    def note(self, text: str) -> None:
        """Append a line of our own, on a line of its own."""
        start = b"" if self.tail.endswith(b"\n") or not self.tail else b"\n"
        self._append(start + f"redco-flow: {text}\n".encode())

    def close(self) -> None:
        """Append what was held back; the stream has ended."""
        self._append(self._redactor.flush())
        os.close(self._descriptor)

    def _append(self, data: bytes) -> None:
        self.tail = (self.tail + data)[-_TAIL_BYTES:]
        try:
            while data:
                data = data[os.write(self._descriptor, data) :]
        except OSError as error:
            self.problem = f"{self.path}: part of the log is lost: {error.strerror}."
