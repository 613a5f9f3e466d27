"""Supervise one rank of a job of several hosts, in the foreground: what srun starts on each.

`python -m redco_flow.launch.rank ATTEMPT …` under srun; `hosts.ranks` calls `supervise` without it.
Owns `logs/rank<r>.log`, `ranks/<r>/heartbeat` and `ranks/<r>/exit.json`.
Watches the other ranks' endings: when one fails, this one ends within seconds instead of waiting
for it in a collective operation for ever.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from redco_flow.launch import disk_reserve
from redco_flow.launch.endings import (
    RankEnding,
    find_culprit,
    read_endings,
    says_that_a_rank_was_lost,
)
from redco_flow.launch.processes import RankInfo, adopt_orphans
from redco_flow.launch.slurm.nodes import nodes_of_no_fabric
from redco_flow.launch.supervisor import (
    TIME_OVER,
    LogWriter,
    Supervisor,
    WorkerLimits,
    parser_of,
    remove_temporary_files,
    run_worker,
)
from redco_flow.records import list_directory, open_no_link, read_json_if_present, write_json
from redco_flow.spec.secrets import secret_values
from redco_flow.tracking.attempt import AttemptDirectory, Cause
from redco_flow.tracking.process_identity import utc_now

SECONDS_BETWEEN_BEATS = 30.0
_SECONDS_OF_LIFE = 2 * SECONDS_BETWEEN_BEATS
_MAX_CLOCK_ERROR_SECONDS = 600.0

_SECONDS_BETWEEN_LOOKS = 1.0
_SECONDS_EARLY = 75.0  # Slurm sends the warning up to a minute before it was asked to


def heartbeat_path(attempt: AttemptDirectory, rank: int) -> Path:
    """Return the path of a rank's heartbeat."""
    return attempt.rank_directory(rank) / "heartbeat"


def beat(path: Path) -> None:
    """Write that the rank lives; a full disk does not stop it."""
    with suppress(OSError), open(path, "w", encoding="utf-8", opener=open_no_link) as file:
        file.write(utc_now())


class HeartbeatWatch:
    """Whether a rank of an attempt lives, by its files."""

    def __init__(
        self, attempt: AttemptDirectory, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._attempt = attempt
        self._clock = clock
        self._seen: dict[Path, bytes] = {}
        self._changed_at = float("-inf")

    def is_alive(self) -> bool:
        """Whether a heartbeat or progress has changed within two intervals.

        The first look at a file counts as a change, unless the file is too old on any clock.
        """
        for path in (self._attempt.progress_path, *self._attempt.path.glob("ranks/*/heartbeat")):
            with suppress(OSError):  # also ESTALE, of a file that its node has replaced
                with path.open("rb") as file:
                    content = file.read()
                    age = time.time() - os.fstat(file.fileno()).st_mtime
                is_new = path not in self._seen and age < _MAX_CLOCK_ERROR_SECONDS
                if is_new or self._seen.get(path, content) != content:
                    self._changed_at = self._clock()
                self._seen[path] = content
        return self._clock() - self._changed_at < _SECONDS_OF_LIFE


@dataclass
class RankWatch:
    """Stop this rank on the cluster's signals (preemption, walltime) and other ranks' failures."""

    supervisor: Supervisor
    rank_info: RankInfo
    seconds_to_warning: float | None
    started_at: float = field(default_factory=time.monotonic)

    def on_terminate(self) -> None:
        """SIGTERM: cancelled, preempted, out of time or given up for another rank's failure."""
        if not self._follow_a_failed_rank():
            self.supervisor.stop(Cause.TERMINATED, "the cluster asked it to stop.")

    def on_warning(self) -> None:
        """Slurm's warning: the time is nearly over, or the nodes are wanted for another job."""
        elapsed = time.monotonic() - self.started_at
        if (
            self.seconds_to_warning is not None
            and elapsed >= self.seconds_to_warning - _SECONDS_EARLY
        ):
            self.supervisor.stop(Cause.TIMEOUT, "its time (walltime_minutes) is nearly over.")
        else:
            self.supervisor.stop(Cause.PREEMPTED, "its nodes are wanted for another job.")

    def on_time_over(self) -> None:
        """The time is over where no cluster warns before; the grace is for saving."""
        self.supervisor.stop(Cause.TIMEOUT, TIME_OVER)

    def look_at_others(self) -> None:
        """End with the first rank that fails; look again soon."""
        if not self._follow_a_failed_rank():
            self.supervisor.later(_SECONDS_BETWEEN_LOOKS, self.look_at_others)

    def look_for_cancel(self) -> None:
        """Stop once cancel.json asks for it, and at once when it asks again; look again soon."""
        list_directory(self.supervisor.attempt.path)
        request = read_json_if_present(self.supervisor.attempt.cancel_path) or {}
        if request and not self.supervisor.is_stopping:
            self.supervisor.stop(Cause.TERMINATED, "it was cancelled.")
        elif request.get("at_once"):
            self.supervisor.kill_late()
            return
        self.supervisor.later(_SECONDS_BETWEEN_LOOKS, self.look_for_cancel)

    def beat(self) -> None:
        """Write the rank's heartbeat; again soon."""
        beat(heartbeat_path(self.supervisor.attempt, self.rank_info.rank))
        self.supervisor.later(SECONDS_BETWEEN_BEATS, self.beat)

    def _follow_a_failed_rank(self) -> bool:
        culprit = find_culprit(read_endings(self.supervisor.attempt, self.rank_info.restart))
        if culprit is not None:
            why = f"rank {culprit.rank} {culprit.cause}."
            self.supervisor.stop_with_stacks(Cause.TERMINATED, why)
        return culprit is not None


def main(arguments: list[str]) -> int:
    """Run the worker to its end; return 0 unless the other ranks are to be ended too."""
    options = _parse(arguments)
    rank_info = RankInfo.from_slurm(
        os.environ,
        gpus_per_host=options.gpus_per_host,
        rendezvous_seconds=options.rendezvous_seconds,
        fabrics=options.fabric,
    )
    unknown = nodes_of_no_fabric(os.environ, options.fabric) if options.fabric else []
    if unknown and rank_info.rank == 0:
        sys.stderr.write(f"nodes of no fabric in slurm.fabrics: {', '.join(unknown)}\n")
    limits = WorkerLimits(options.stall_seconds, options.grace_seconds)
    times = (options.seconds_to_warning, options.seconds_to_end)
    return supervise(options.attempt, rank_info, limits, *times, heeds_cancel=options.heeds_cancel)


def supervise(
    path: Path,
    rank_info: RankInfo,
    limits: WorkerLimits,
    seconds_to_warning: float | None = None,
    seconds_to_end: float | None = None,
    *,
    heeds_cancel: bool = False,
) -> int:
    """Run the worker of the attempt at `path` to its end, and write the rank's ending.

    Args:
        seconds_to_warning: when Slurm warns that the walltime is nearly over; None: never.
        seconds_to_end: the walltime, where no cluster enforces it, as of a stage that shares a job;
            one that begins with none left ends at once.
        heeds_cancel: stop when the attempt has a cancel.json; no signal tells of it, as where the
            job runs other stages, too.

    Returns:
        0 unless the other ranks are to be ended too.
    """
    os.environ.update(rank_info.to_environment())
    attempt = AttemptDirectory(path, rank_info.rank)
    folder = attempt.rank_directory(rank_info.rank)
    folder.mkdir(parents=True, exist_ok=True)
    _remove_earlier_endings(attempt)
    log_start = _size(attempt.log_path(rank_info.rank))
    log = LogWriter(attempt.log_path(rank_info.rank), secret_values(os.environ))
    supervisor = Supervisor(attempt, limits, log)
    watch = RankWatch(supervisor, rank_info, seconds_to_warning)
    supervisor.listen({signal.SIGTERM: watch.on_terminate, signal.SIGURG: watch.on_warning})
    supervisor.later(0.0, watch.beat)
    if rank_info.num_processes > 1:
        supervisor.later(0.0, watch.look_at_others)
    if seconds_to_end is not None:
        supervisor.later(seconds_to_end, watch.on_time_over)
    if heeds_cancel:
        supervisor.later(0.0, watch.look_for_cancel)
    adopt_orphans()
    # JAX ends who has lost another rank by an abort: no core files of gigabytes for that.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    if rank_info.rank == 0:
        disk_reserve.take(attempt.path)
    record = run_worker(supervisor)
    known = asdict(record)
    if record.cause is Cause.CANCELLED:  # the worker was faster than its supervisor
        known["cause"] = Cause.TERMINATED
    if rank_info.num_processes > 1 and record.cause.is_failure:
        known["lost_another_rank"] = says_that_a_rank_was_lost(log.path, log_start)
    known |= {"rank": rank_info.rank, "restart": rank_info.restart, "host": os.uname().nodename}
    if rank_info.rank == 0:
        remove_temporary_files(attempt)
    heartbeat_path(attempt, rank_info.rank).unlink(missing_ok=True)
    write_json(attempt.rank_exit_path(rank_info.rank), RankEnding(**known).to_json())
    return 1 if record.cause.is_failure else 0


def _remove_earlier_endings(attempt: AttemptDirectory) -> None:
    """Remove the records of this rank from before the cluster restarted the job."""
    paths = [attempt.error_path, attempt.rank_exit_path(attempt.rank)]
    for path in paths + ([attempt.exit_path] if attempt.rank == 0 else []):
        with contextlib.suppress(FileNotFoundError):
            path.unlink()


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = parser_of("redco_flow.launch.rank")
    parser.add_argument("--gpus-per-host", type=int, default=0)
    parser.add_argument("--rendezvous-seconds", type=int, default=300)
    parser.add_argument("--fabric", action="append", default=[])
    parser.add_argument("--seconds-to-warning", type=float)
    parser.add_argument("--seconds-to-end", type=float)
    parser.add_argument("--heeds-cancel", action="store_true")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
