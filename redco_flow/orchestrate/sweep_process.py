"""The process that starts a sweep's runs: `python -m redco_flow.orchestrate.sweep_process SWEEP`.

In a session of its own, so it outlives the terminal. Starts each run that has not ended and that
nobody drives, once, so many at a time; each run is driven by its own process. If this one dies, the
runs go on, and `resume_sweep` starts the others.

Where the cluster itself can have jobs wait for each other, the jobs of all points are submitted
first. From then on no process is needed; a run gets its driver when a job of its own has begun.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from redco_flow.errors import RedcoFlowError
from redco_flow.orchestrate.cancelling import has_ended
from redco_flow.orchestrate.starting import spawn
from redco_flow.tracking.clock import utc_now
from redco_flow.tracking.lease import acquire, find_holder
from redco_flow.tracking.run_directory import RunDirectory
from redco_flow.tracking.sweep_directory import SweepDirectory

if TYPE_CHECKING:
    from redco_flow.orchestrate.point_jobs import PointJobs

_POLL_SECONDS = 0.3
_QUEUE_POLL_SECONDS = 1.0


def main(arguments: list[str]) -> int:
    """Start every run in its turn; return when all have ended."""
    sweep = SweepDirectory(Path(arguments[0]))
    try:
        with acquire(sweep):
            _drive(sweep)
    except RedcoFlowError as error:
        _say(str(error))
        return error.exit_code
    return 0


def _drive(sweep: SweepDirectory) -> None:
    waiting = [run for run in sweep.runs if not has_ended(run) and find_holder(run) is None]
    turns = _submit(sweep, waiting) if sweep.is_ahead else _Turns()
    while not sweep.cancel_path.exists():
        at_work = [run for run in sweep.runs if find_holder(run) is not None]
        if not waiting and not at_work:
            return
        has_room = len(at_work) < sweep.record["max_parallel"]
        ready = next(filter(turns.is_ready, waiting), None) if has_room else None
        if ready is None:
            time.sleep(turns.seconds_between_looks)
            continue
        waiting.remove(ready)
        if not has_ended(ready):  # it may have been cancelled before its turn
            _start(ready, turns.options)


@dataclass(frozen=True)
class _Turns:
    """When runs may start: at any time, or when the jobs that they have want it.

    Args:
        jobs: by run id; none where runs submit their own.
    """

    jobs: Mapping[str, PointJobs] = field(default_factory=dict)

    def is_ready(self, run: RunDirectory) -> bool:
        return run.id not in self.jobs or self.jobs[run.id].want_driver()

    @property
    def seconds_between_looks(self) -> float:
        """Each look reads the records of every job."""
        return _QUEUE_POLL_SECONDS if self.jobs else _POLL_SECONDS

    @property
    def options(self) -> tuple[str, ...]:
        """Of the driver's process: what ended before it came is its to judge."""
        return ("--judge-ended",) if self.jobs else ()


def _submit(sweep: SweepDirectory, runs: Sequence[RunDirectory]) -> _Turns:
    """Have the jobs of all points stand in the queue."""
    # Imported here: where runs submit their own jobs, this process knows no executor.
    from redco_flow.orchestrate.point_jobs import PointJobs
    from redco_flow.orchestrate.sweep_submission import submit_points

    submit_points(sweep, runs, _say)
    return _Turns({run.id: PointJobs(run) for run in runs})


def _start(run: RunDirectory, options: Sequence[str]) -> None:
    """Start one run; where it cannot be, its own log says why, and the others have their turn."""
    _say(f"starts {run.id}")
    try:
        spawn(run, *options)
    except RedcoFlowError as error:
        _say(str(error))


def _say(line: str) -> None:
    sys.stderr.write(f"{utc_now()} {line}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
