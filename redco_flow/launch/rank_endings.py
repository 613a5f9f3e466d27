"""How the ranks of one job ended, and which of them is to blame.

A rank that fails takes the others along: they are killed, or lose the one they talk to. The
job's ending is the culprit's. Reads `ranks/*/exit.json`; knows no cluster.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redco_flow.tracking.attempt import AttemptDirectory, ExitRecord
from redco_flow.tracking.typed_records import find_record, unless_damaged

FAILURES = ("failed", "out_of_memory", "stalled", "lost")
"""Causes of a rank's end that end the other ranks too."""

TERMINATED = "terminated"
"""Somebody sent SIGTERM: the cluster for reasons of its own, or because another rank failed."""

TAKEN_BACK = (TERMINATED, "preempted", "node_failure")
"""Causes after which the cluster starts the job again."""

_LOSS_MARKS = (
    b"the JAX distributed service detected fatal errors",
    b"stopped sending heartbeats",
    b"Shutdown barrier has failed",
    b"Connection closed by peer",
    b"Connection reset by peer",
    b"rank 0 left the meeting",
)
_LOG_END_BYTES = 1 << 16
_NEEDS = ("rank", "restart", "host", "cause", "message", "ended_at", "exit_code", "signal")


class RankExitRecord(ExitRecord, total=False):
    """`ranks/<rank>/exit.json`."""

    lost_another_rank: bool
    peak_memory_bytes: int


@dataclass(frozen=True)
class RankEnding:
    """One rank's `exit.json`."""

    record: Mapping[str, Any]

    @property
    def rank(self) -> int:
        """Whose."""
        return int(self.record["rank"])

    @property
    def cause(self) -> str:
        """Why it ended."""
        return str(self.record["cause"])

    @property
    def is_failure(self) -> bool:
        """Whether the other ranks cannot go on without it."""
        return self.cause in FAILURES

    @property
    def is_victim(self) -> bool:
        """Whether it failed only because it lost another rank."""
        return self.is_failure and bool(self.record.get("lost_another_rank"))


def says_that_a_rank_was_lost(log: Path, start: int) -> bool:
    """Look whether the end of a rank's log has the words of JAX for another rank's death.

    Args:
        start: bytes that the log had before this start of the job.
    """
    with log.open("rb") as file:
        file.seek(max(start, file.seek(0, os.SEEK_END) - _LOG_END_BYTES))
        text = file.read()
    return any(mark in text for mark in _LOSS_MARKS)


def read_endings(attempt: AttemptDirectory, restart: int) -> list[RankEnding]:
    """Return the endings of this start of the job, by rank; ranks that have not ended lack."""
    found = []
    for folder in (attempt.path / "ranks").glob("*"):
        record = _read(folder / "exit.json")
        if record is not None and record["restart"] == restart:
            found.append(RankEnding(record))
    return sorted(found, key=lambda ending: ending.rank)


def last_restart(attempt: AttemptDirectory) -> int:
    """Return how often the job was started anew, as far as its ranks have written."""
    records = (_read(path) for path in attempt.path.glob("ranks/*/exit.json"))
    return max((int(record["restart"]) for record in records if record is not None), default=0)


def _read(path: Path) -> RankExitRecord | None:
    """A rank's ending; one that is damaged is no word of how it ended."""
    return unless_damaged(lambda: find_record(path, RankExitRecord, needs=_NEEDS))


def find_culprit(endings: Iterable[RankEnding]) -> RankEnding | None:
    """Return the first rank that failed by itself; if none did, the first that failed."""
    failures = [ending for ending in endings if ending.is_failure]
    # Clocks of hosts differ by less than a victim needs to notice, except when they do not:
    # hence what it said counts before when it ended.
    return min(failures, key=lambda one: (one.is_victim, one.record["ended_at"]), default=None)


def judge_group(endings: list[RankEnding], num_processes: int) -> dict[str, Any]:
    """Return what the job's exit.json says, except when it was cancelled.

    Its cause may be TERMINATED: only the cluster knows why.
    """
    culprit = find_culprit(endings)
    missing = set(range(num_processes)) - {ending.rank for ending in endings}
    if missing and (culprit is None or culprit.is_victim):
        text = f"{_named(missing)} of {num_processes} left no word: the host went down, or the "
        return _record("node_failure", f"{text}supervisor was killed.", endings)
    silent = {ending.rank for ending in endings if ending.cause == TERMINATED}
    if culprit is not None and culprit.is_victim and silent:
        text = (
            f"{_named(silent)} of {num_processes} no longer answered the others and had to be "
            f"killed; stacks are in the logs. Noticed by rank {culprit.rank}: "
        )
        return _record_of(culprit, num_processes, endings) | {
            "cause": "stalled",
            "message": text + str(culprit.record["message"]),
            "rank": min(silent),
        }
    if culprit is not None:
        return _record_of(culprit, num_processes, endings)
    for cause in (TERMINATED, "preempted", "timeout"):
        stopped = [ending for ending in endings if ending.cause == cause]
        if stopped:
            return _record_of(stopped[0], num_processes, endings)
    return _record_of(endings[0], num_processes, endings)


def _named(ranks: Iterable[int]) -> str:
    ranks = sorted(ranks)
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _record_of(ending: RankEnding, num_processes: int, all_of: list[RankEnding]) -> dict[str, Any]:
    message = str(ending.record["message"])
    if num_processes > 1 and ending.cause != "completed":
        message = f"rank {ending.rank} of {num_processes} on {ending.record['host']}: {message}"
    return _record(ending.cause, message, all_of) | {
        key: ending.record[key]
        for key in ("exit_code", "signal", "ended_at", "rank", "host", "restart")
    }


def _record(cause: str, message: str, endings: list[RankEnding]) -> dict[str, Any]:
    peaks = [int(ending.record.get("peak_memory_bytes", 0)) for ending in endings]
    return {
        "exit_code": None,
        "signal": None,
        "cause": cause,
        "message": message,
        "peak_memory_bytes": max(peaks, default=0),
        "ended_at": None,
    }
