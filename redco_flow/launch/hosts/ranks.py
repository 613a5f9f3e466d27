"""Start, find and stop the ranks of a job on this host: each detached, each once.

Whether a rank runs is shown by the lock that its process holds and by that process's identity, so
asking twice starts nothing twice. Knows no launcher: everything is a request and an answer.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from redco_flow.errors import StageFailed
from redco_flow.launch.processes import ATTEMPT_VARIABLE, RankInfo, kill_processes_of
from redco_flow.launch.rank import supervise
from redco_flow.launch.supervisor import WorkerLimits, parser_of
from redco_flow.records import open_no_link, read_json_if_present, write_json
from redco_flow.tracking.attempt import AttemptDirectory
from redco_flow.tracking.process_identity import ProcessIdentity, utc_now

_SECONDS_TO_START = 30.0
_SECONDS_BETWEEN_LOOKS = 0.02


@dataclass(frozen=True)
class RanksOrder:
    """A launcher's order to start ranks on one host.

    Args:
        attempt: its directory on this host.
        rank_infos: one for each rank of this host, as the fields of `RankInfo`.
        environment: added to what a login gets; may hold secrets, so it is written nowhere.
        walltime_seconds: None is unlimited.
    """

    attempt: str
    rank_infos: list[dict[str, int]]
    stall_seconds: float
    grace_seconds: float
    environment: dict[str, str] = field(default_factory=dict)
    walltime_seconds: float | None = None


def start(order: RanksOrder) -> list[dict[str, Any]]:
    """Start every rank that has not been started yet; return all their identities.

    No rank of a cancelled attempt is started: `begin` may arrive after `end`.

    Raises:
        StageFailed: a rank did not come up; has the end of its log.
        OSError: the directory cannot be written; names the path.
    """
    attempt = AttemptDirectory(Path(order.attempt))
    attempt.logs.mkdir(exist_ok=True)
    rank_infos = [RankInfo(**rank_info) for rank_info in order.rank_infos]
    started = [one.rank for one in rank_infos if _start_rank(attempt, order, one)]
    return [_wait_for_runner(attempt, rank) for rank in started]


def stop(attempt: AttemptDirectory, *, at_once: bool) -> None:
    """Ask this host's ranks to stop, and leave nothing that runs without its rank's supervisor.

    A rank that has not been started yet will not start.

    Args:
        at_once: kill them instead.
    """
    attempt.path.mkdir(parents=True, exist_ok=True)
    write_json(attempt.cancel_path, {"time": utc_now()})
    runners = [one for _, one in runners_of(attempt) if one.is_alive()]
    for runner in runners:
        _signal(runner, signal.SIGTERM)
    if at_once or not runners:
        kill_processes_of(attempt.path)


def runners_of(attempt: AttemptDirectory) -> Iterator[tuple[int, ProcessIdentity]]:
    """Yield each rank that was ever started for the attempt here, and its process."""
    for path in sorted(attempt.path.glob("ranks/*/runner.json")):
        record = read_json_if_present(path)
        if record is not None:
            yield int(path.parent.name), ProcessIdentity.from_json(record)


def is_starting(attempt: AttemptDirectory, rank: int) -> bool:
    """Whether a process holds a rank's lock; it may not have written runner.json yet."""
    try:
        lock = open_no_link(attempt.rank_directory(rank) / "lock", os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        return not _take(lock, fcntl.LOCK_SH)
    finally:
        os.close(lock)


def _start_rank(attempt: AttemptDirectory, order: RanksOrder, rank_info: RankInfo) -> bool:
    """Start a rank; say whether it was ever started, now or before."""
    folder = attempt.rank_directory(rank_info.rank)
    folder.mkdir(parents=True, exist_ok=True)
    lock = open_no_link(folder / "lock", os.O_RDWR | os.O_CREAT)
    try:
        if not _take(lock, fcntl.LOCK_EX) or (folder / "runner.json").exists():
            return True  # it runs, or has run
        if attempt.cancel_path.exists():
            return False
        environment = {
            **os.environ,
            **order.environment,
            **rank_info.to_environment(),
            ATTEMPT_VARIABLE: str(attempt.path),
        }
        with open(attempt.log_path(rank_info.rank), "ab", opener=open_no_link) as log:
            subprocess.Popen(
                _command(order),
                env=environment,
                cwd=attempt.path,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[lock],  # it holds the lock from here on
                start_new_session=True,
            )
    finally:
        os.close(lock)
    return True


def _take(lock: int, kind: int) -> bool:
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _command(order: RanksOrder) -> list[str]:
    walltime = order.walltime_seconds
    return [
        *(sys.executable, "-P", "-m", "redco_flow.launch.hosts.ranks", order.attempt),
        *("--stall-seconds", str(order.stall_seconds)),
        *("--grace-seconds", str(order.grace_seconds)),
        *([] if walltime is None else ["--walltime-seconds", str(walltime)]),
    ]


def _wait_for_runner(attempt: AttemptDirectory, rank: int) -> dict[str, Any]:
    deadline = time.monotonic() + _SECONDS_TO_START
    path = attempt.rank_directory(rank) / "runner.json"
    while (record := read_json_if_present(path)) is None:
        if time.monotonic() > deadline:
            said = attempt.log_path(rank).read_text(errors="replace")[-2000:]
            raise StageFailed(f"rank {rank} did not start on {os.uname().nodename}: {said}")
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    runner: dict[str, Any] = record
    return runner


def _signal(process: ProcessIdentity, number: signal.Signals) -> None:
    """Signal exactly this process, if it is still there."""
    with contextlib.suppress(ProcessLookupError):
        handle = os.pidfd_open(process.pid)
        try:
            if process.is_running_here():
                signal.pidfd_send_signal(handle, number)
        finally:
            os.close(handle)


def main(arguments: list[str]) -> int:
    """Say who runs the rank, then run it."""
    options = _parse(arguments)
    rank_info = RankInfo.from_environment(os.environ)
    attempt = AttemptDirectory(options.attempt, rank_info.rank)
    runner = attempt.rank_directory(rank_info.rank) / "runner.json"
    write_json(runner, ProcessIdentity.current().to_json())
    return supervise(
        options.attempt,
        rank_info,
        WorkerLimits(options.stall_seconds, options.grace_seconds),
        seconds_to_end=options.walltime_seconds,
        heeds_cancel=attempt.cancel_path.exists(),  # `stop` may have missed the new runner.json
    )


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = parser_of("redco_flow.launch.hosts.ranks")
    parser.add_argument("--walltime-seconds", type=float)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
