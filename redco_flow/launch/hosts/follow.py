"""Stream logs, metrics and records of a job's ranks on this host to a launcher, until they end.

Sends what is new in logs and metrics, small records when they change, which checkpoints are
committed, and last how the ranks ended. Takes the other hosts' records in, so that ranks without
a common file system find the same files as ranks with one. Ends when
the launcher does not listen any more.
"""

from __future__ import annotations

import base64
import io
import json
import re
import selectors
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from redco_flow.launch.hosts.ranks import is_starting, runners_of
from redco_flow.records import change_mark, read_json_if_present, write_json
from redco_flow.tracking.attempt import AttemptDirectory
from redco_flow.tracking.process_identity import ProcessIdentity

Send = Callable[[Mapping[str, Any]], None]

SECONDS_BETWEEN_WORDS = 2.0
_SECONDS_BETWEEN_LOOKS = 0.2
_SECONDS_WITHOUT_LISTENER = 60.0
_MAX_CHUNK_BYTES = 256 << 10
GROWING = ("metrics.jsonl", "system_metrics.jsonl")
"""Files of the attempt to which rank 0's host appends, beside the logs."""

_SHARED = re.compile(r"ranks/(meeting\d+|\d+/exit)\.json")
"""Records that every rank of a group reads, its own and others'."""

_MEETING = re.compile(r"ranks/meeting\d+\.json")
"""Holds the word by which ranks know each other."""

_MIRRORED = re.compile(
    r"(progress|error|result)\.json|ranks/(meeting\d+|\d+/(progress|error|result|exit))\.json"
    r"|(system_)?metrics\.jsonl|logs/rank\d+\.log|(tensorboard|wandb|profile)(/[^/.][^/]*)+"
)


def is_mirrored(name: str) -> bool:
    """Say whether a host may write this file of an attempt on the launcher's machine."""
    return _MIRRORED.fullmatch(name) is not None


def is_for_all(name: str) -> bool:
    """Say whether the other hosts must get this record too."""
    return _SHARED.fullmatch(name) is not None


def write_record(folder: Path, name: str, value: Any) -> None:
    """Write a record that came from another machine, readable by whom its own is."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, value, private=_MEETING.fullmatch(name) is not None)


@dataclass
class Follower:
    """One launcher's view of a job's part on this host.

    Args:
        ranks: of this host.
        offsets: bytes that the launcher has of each growing file.
        checkpoints: where the stage commits them; None where nothing is to be copied.
    """

    attempt: AttemptDirectory
    ranks: list[int]
    offsets: dict[str, int]
    send: Send
    checkpoints: Path | None = None
    copies: bool = True
    _sent: dict[str, tuple[int, int]] = field(default_factory=dict)
    _steps: list[int] | None = None
    _said_at: float = field(default_factory=time.monotonic)

    def look(self) -> bool:
        """Send what is new; return whether the ranks have ended and all is sent."""
        states = {rank: self._state(rank) for rank in self.ranks}
        if self.copies:
            while self._send_growth():
                pass
            self._send_records()
            self._send_steps()
        if "running" not in states.values():
            self._tell({"ended": states})
            return True
        if time.monotonic() - self._said_at >= SECONDS_BETWEEN_WORDS:
            self._tell({})
        return False

    def take(self, said: Mapping[str, Any]) -> None:
        """Take in another host's record."""
        for name, value in said.get("records", {}).items():
            own = {f"ranks/{rank}/exit.json" for rank in self.ranks}
            if is_for_all(name) and name not in own:
                write_record(self.attempt.path, name, value)

    def _tell(self, record: Mapping[str, Any]) -> None:
        self.send(record)
        self._said_at = time.monotonic()

    def _state(self, rank: int) -> str:
        """running, ended, gone (killed without a word), rebooted, or never started."""
        runner = dict(runners_of(self.attempt)).get(rank)
        if self.attempt.rank_exit_path(rank).exists():
            return "ended"
        if runner is None:
            return "running" if is_starting(self.attempt, rank) else "never started"
        if runner.is_alive():
            return "running"
        if runner.boot_id != ProcessIdentity.current().boot_id:
            return "rebooted"
        return "ended" if self.attempt.rank_exit_path(rank).exists() else "gone"

    def _send_growth(self) -> bool:
        """Send up to one chunk of each growing file; return whether there may be more."""
        has_more = False
        names = [f"logs/rank{rank}.log" for rank in self.ranks]
        for name in [*names, *(GROWING if 0 in self.ranks else [])]:
            path = self.attempt.path / name
            if not path.is_file():
                continue
            with path.open("rb") as file:
                offset = file.seek(self.offsets.get(name, 0))
                chunk = file.read(_MAX_CHUNK_BYTES)
            if chunk:
                data = base64.b64encode(chunk).decode()
                self._tell({"grown": name, "offset": offset, "data": data})
                self.offsets[name] = offset + len(chunk)
                has_more |= len(chunk) == _MAX_CHUNK_BYTES
        return has_more

    def _send_records(self) -> None:
        for path in self._own_records():
            name = path.relative_to(self.attempt.path).as_posix()
            mark = change_mark(path)
            if self._sent.get(name) == mark:
                continue
            try:
                value = read_json_if_present(path)
            except ValueError as error:  # a full disk, perhaps; the rest must still get through
                value = {"problem": str(error)}
            if value is not None:
                self._tell({"record": name, "value": value})
                self._sent[name] = mark

    def _own_records(self) -> Iterator[Path]:
        folder = self.attempt.path
        if 0 in self.ranks:
            yield from (folder / f"{name}.json" for name in ("progress", "error", "result"))
            yield from sorted(folder.glob("ranks/meeting*.json"))
        for rank in self.ranks:
            names = ("progress", "error", "result", "exit")
            yield from (folder / f"ranks/{rank}/{name}.json" for name in names)

    def _send_steps(self) -> None:
        """Send the list of committed checkpoints when it changes."""
        if self.checkpoints is None:
            return
        found = sorted(
            int(path.parent.name)
            for path in self.checkpoints.glob("*/commit.json")
            if path.parent.name.isdigit()
        )
        if found != self._steps:
            self._steps = found
            self._tell({"steps": found})


def follow(request: Mapping[str, Any], listener: io.RawIOBase) -> None:
    """Follow until the ranks have ended, or the launcher does not listen.

    Args:
        listener: unbuffered, so that no line waits in a buffer while nothing arrives.
    """
    checkpoints = request["checkpoints"]
    follower = Follower(
        AttemptDirectory(Path(request["attempt"])),
        list(request["ranks"]),
        dict(request["offsets"]),
        _print,
        Path(checkpoints) if checkpoints else None,
        bool(request["copies"]),
    )
    ears = selectors.DefaultSelector()
    ears.register(listener, selectors.EVENT_READ)
    heard_at = time.monotonic()
    while not follower.look():
        if ears.select(_SECONDS_BETWEEN_LOOKS):
            line = listener.readline()
            if not line:
                return
            heard_at = time.monotonic()
            follower.take(json.loads(line))
        if time.monotonic() - heard_at > _SECONDS_WITHOUT_LISTENER:
            return


def _print(record: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(dict(record)) + "\n")
    sys.stdout.flush()
