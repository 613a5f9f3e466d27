"""Read the files of an attempt while a job writes them, perhaps on another host.

Records may appear late (NFS), and a log may hold anything: 50 MB without a newline, progress bars
drawn with carriage returns, colours, bytes that are no text. What is shown is capped; the whole
stays in the file.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

from redco_flow.errors import DamagedRecord, StageFailed
from redco_flow.records import list_directory
from redco_flow.terminal_text import line_shown
from redco_flow.tracking.artifacts import ArtifactStore
from redco_flow.tracking.attempt import AttemptDirectory
from redco_flow.tracking.results import StageResult, find_new_result, read_result
from redco_flow.tracking.workspace import SHORT_DIGITS, Workspace

_SECONDS_BETWEEN_LOOKS = 0.5

_MAX_BYTES_PER_READ = 1 << 20
_MAX_LINES_PER_READ = 200
_MAX_LINE_CHARACTERS = 2000


def await_result(
    workspace: Workspace,
    attempt: AttemptDirectory,
    *,
    seconds: float,
    while_waiting: Callable[[str, float], None],
) -> StageResult:
    """Return the result of an attempt whose job has completed.

    Each look lists the directory of what is missing: NFS then asks its server again.

    Args:
        seconds: how long to wait for the records; 0 where the job ended on this host.
        while_waiting: called between two looks with what is not visible and for how many seconds
            to sleep; may raise to give up.

    Raises:
        StageFailed: they have not appeared; names the directory and how long was waited.
    """
    started_at = time.monotonic()
    while True:
        missing = attempt.result_path
        with contextlib.suppress(DamagedRecord):  # its name may be visible before its content is
            record = attempt.read_result()
            if record is not None:
                result = find_new_result(workspace, record["fingerprint"])
                if result is not None:
                    return result
                missing = _missing(workspace, record["fingerprint"])
        waited = time.monotonic() - started_at
        if waited >= seconds:
            raise StageFailed(_explain(attempt, missing, waited if seconds else 0.0))
        while_waiting(f"{missing.name} to appear in {missing.parent}", _SECONDS_BETWEEN_LOOKS)
        list_directory(missing.parent)
        list_directory(missing)


def _missing(workspace: Workspace, fingerprint: str) -> Path:
    """The first record or file of a published result that cannot be read here."""
    result = read_result(workspace, fingerprint)
    if result is None:
        return workspace.results / f"{fingerprint}.json"
    store = ArtifactStore(workspace)
    for name, artifact_id in result.outputs.items():
        directory = workspace.artifacts / name.partition("/")[0] / artifact_id[:SHORT_DIGITS]
        artifact = store.find(artifact_id)
        if artifact is None:
            return directory / "manifest.json"
        for entry in artifact.manifest["files"]:
            path = artifact.path / entry["path"]
            with contextlib.suppress(OSError):  # ESTALE
                if path.is_file():
                    continue
            return path
    return workspace.artifacts


def _explain(attempt: AttemptDirectory, missing: Path, waited: float) -> str:
    waiting = f" after {waited:.0f} s" if waited else ""
    return (
        f"stage '{attempt.stage}': its job completed, but {missing.name} is not visible in "
        f"{missing.parent}{waiting}. If `ls {missing.parent}` shows it on another node, the file "
        f"system shows new files late here (`redco-flow doctor` measures it): "
        f"`redco-flow resume` uses it once it is visible. If no node has it, it was deleted: "
        f"`redco-flow retry` computes it again."
    )


class LogTail:
    """One log file, followed from its beginning."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0
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
        note = f"[{left_out} lines are not shown here; all of them are in {self.path}]"
        return [note, *shown[-_MAX_LINES_PER_READ:]]

    def _read(self) -> bytes:
        """At most a bounded piece; a log that grows faster is skipped forward, never piled up."""
        try:
            with self.path.open("rb") as file:
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
    text = line_shown(raw)
    if len(text) > _MAX_LINE_CHARACTERS:
        return f"{text[:_MAX_LINE_CHARACTERS]}… [{len(text)} characters]"
    return text
