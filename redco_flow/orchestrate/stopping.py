"""What the threads of the orchestrating process share: the run's context and requests to stop it.

Two kinds: cancel ends the jobs too; detach leaves them running for a later `resume`. The first
request counts, except that a cancel outranks a detach that has not been acted on.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from redco_flow.errors import RunCancelled
from redco_flow.orchestrate.plan import Plan
from redco_flow.orchestrate.state import StateBook
from redco_flow.spec.load import ResolvedPipeline
from redco_flow.spec.profile import Profile
from redco_flow.terminal_text import without_codes
from redco_flow.tracking.run_directory import RunDirectory
from redco_flow.tracking.workspace import Workspace

StopKind = Literal["cancel", "detach"]


class Detached(BaseException):
    """The orchestrating process stops following its jobs, which run on.

    Not an `Exception`: nothing between here and the process's end may take it for a failure.
    """


class StopRequest:
    """Set once by a signal handler or a poller, waited for by all others."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._signal: str | None = None
        self.kind: StopKind | None = None
        self.reason = ""

    def cancel(self, reason: str) -> None:
        """Ask for the run's jobs to be ended."""
        if self.kind != "cancel":
            self.kind, self.reason = "cancel", reason
        self._event.set()

    def on_signal(self, number: int, frame: object) -> None:
        """Note a signal: a handler, which may touch no lock."""
        self._signal = signal.Signals(number).name

    def act_on_signal(self) -> None:
        """Ask this process to end if a signal came."""
        if self._signal is not None:
            self.detach(f"got {self._signal}")

    def detach(self, reason: str) -> None:
        """Ask only this process to end."""
        if self.kind is None:
            self.kind, self.reason = "detach", reason
        self._event.set()

    def wait(self, seconds: float) -> bool:
        """Sleep, but not longer than until a request; return whether there is one."""
        return self._event.wait(seconds)

    def raise_if_set(self, stage: str) -> None:
        """Raise once a stop was asked for.

        Args:
            stage: what does not go on, for the message.

        Raises:
            RunCancelled: the jobs are to end too.
            Detached: only this process is to end.
        """
        if self.kind == "detach":
            raise Detached(self.reason)
        if self.kind == "cancel":
            raise RunCancelled(f"stage '{stage}' was cancelled: {self.reason}")

    @property
    def is_set(self) -> bool:
        """Whether a stop was asked for."""
        return self.kind is not None


Say = Callable[[str], None]
"""Takes one line for people: a job's log line, or what the orchestrator does."""


@dataclass(frozen=True)
class RunContext:
    """One run as the process that holds its lease sees it.

    Args:
        slots: as many jobs at a time as the profile allows.
        environment: what jobs inherit: this process's as it was before Prefect's settings.
        code: commit and whether it is dirty, for the records.
        ahead: all stages' jobs are submitted at once, each behind those it takes from.
    """

    run: RunDirectory
    workspace: Workspace
    pipeline: ResolvedPipeline
    profile: Profile
    plan: Plan
    book: StateBook
    stop: StopRequest
    slots: threading.BoundedSemaphore
    environment: Mapping[str, str]
    code: dict[str, Any] = field(default_factory=dict)
    ahead: bool = False


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
