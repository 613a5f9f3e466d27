"""Find an answer in a text by a regular expression, in another process and with a time limit.

Some patterns take exponential or quadratic time on some texts, and a thread in `re` cannot be
stopped: it holds the GIL, and with it the heartbeats of its process.
"""

from __future__ import annotations

import json
import os
import re
import select
import subprocess
import sys
import threading
import time

from redco_flow.launch.processes import die_with_parent
from redco_flow.stages.evaluate.own_process import command

_CHUNK_BYTES = 1 << 16
_SECONDS_TO_START = 60.0


class ExtractionTimedOut(Exception):
    """A text took longer than the limit."""


class Extraction:
    """Finds what a text answers; each thread that calls it has its own process.

    Args:
        pattern: its last match counts: the first group, or all of it where it has none. None: the
            whole text.
        seconds: for each text.
    """

    def __init__(self, pattern: str | None, seconds: float) -> None:
        self._pattern = pattern
        self._seconds = seconds
        self._processes: dict[int, _MatchingProcess] = {}

    def __enter__(self) -> Extraction:
        return self

    def __exit__(self, *_: object) -> None:
        """End the processes."""
        for process in self._processes.values():
            process.end()
        self._processes.clear()

    def __call__(self, text: str) -> str | None:
        """Return what the text answers; None where it answers nothing.

        Raises:
            ExtractionTimedOut: it took longer than the limit.
        """
        if self._pattern is None:
            return text
        thread = threading.get_ident()
        process = self._processes.pop(thread, None) or _MatchingProcess(self._pattern)
        try:
            found = process.find(text, time.monotonic() + self._seconds)
        except BaseException:
            process.end()
            raise
        self._processes[thread] = process
        return found


class _MatchingProcess:
    """Python with one compiled pattern, which reads texts and writes what it finds."""

    def __init__(self, pattern: str) -> None:
        self._process = subprocess.Popen(
            command(__name__, has_site_packages=False),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Where modules of a cluster provide Python, it does not start without its libraries.
            env={key: os.environ[key] for key in ("LD_LIBRARY_PATH",) if key in os.environ},
        )
        try:
            self._write(pattern)
            # On a busy machine a start takes seconds, which are not the first text's.
            self._read_line(time.monotonic() + _SECONDS_TO_START)
        except BaseException:
            self.end()
            raise

    def find(self, text: str, deadline: float) -> str | None:
        """Return the match in a text.

        Raises:
            ExtractionTimedOut: it is not found by then; the process is of no further use.
        """
        self._write(text)
        found: str | None = json.loads(self._read_line(deadline))
        return found

    def end(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.communicate()

    def _write(self, text: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(text).encode() + b"\n")
        self._process.stdin.flush()

    def _read_line(self, deadline: float) -> bytes:
        assert self._process.stdout is not None
        output, line = self._process.stdout.fileno(), b""
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([output], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise ExtractionTimedOut
            chunk = self._process.stdout.read1(_CHUNK_BYTES)  # type: ignore[attr-defined]
            if not chunk:
                raise RuntimeError("the process that matches `judge.extract` ended by itself")
            line += chunk
        return line


def main() -> None:
    """Read a pattern, and write a line; then read texts, and write the last match in each."""
    die_with_parent(os.getppid())  # a match may never end
    pattern = re.compile(json.loads(sys.stdin.readline()))
    sys.stdout.write("null\n")
    sys.stdout.flush()
    for line in sys.stdin:
        last = None
        for match in pattern.finditer(json.loads(line)):
            last = match.group(min(1, pattern.groups))
        sys.stdout.write(json.dumps(last) + "\n")
        sys.stdout.flush()
