"""The process that starts a sweep's runs: `python -m redco_flow.orchestrate.sweep_process SWEEP`.

In a session of its own, so it outlives the terminal. Starts each run that has not ended and that
has no orchestrator, once, so many at a time; each run is driven by its own process. If this one
dies, the runs go on, and `resume_sweep` starts the others.

Where the cluster itself can have jobs wait for each other, the jobs of all points are submitted
first. From then on no process is needed; a run gets its driver when a job of its own has begun.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
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
    jobs = _submit(sweep, waiting) if sweep.is_ahead else {}
    while not sweep.cancel_path.exists():
        at_work = [run for run in sweep.runs if find_holder(run) is not None]
        if not waiting and not at_work:
            return
        has_room = len(at_work) < sweep.record["max_parallel"]
        ready = next((run for run in waiting if _is_ready(run, jobs)), None) if has_room else None
        if ready is None:
            # Each look at jobs reads the records of all of them.
            time.sleep(_QUEUE_POLL_SECONDS if jobs else _POLL_SECONDS)
            continue
        waiting.remove(ready)
        if not has_ended(ready):  # it may have been cancelled before its turn
            # What ended before the driver came is the driver's to judge.
            _start(ready, ["--judge-ended"] if jobs else [])


def _is_ready(run: RunDirectory, jobs: Mapping[str, PointJobs]) -> bool:
    """Whether a run may start: at any time, or when the jobs that it has want a driver."""
    return run.id not in jobs or jobs[run.id].want_driver()


def _submit(sweep: SweepDirectory, runs: Sequence[RunDirectory]) -> dict[str, PointJobs]:
    """Have the jobs of all points stand in the queue; return them by run."""
    # Imported here: where runs submit their own jobs, this process knows no executor.
    from redco_flow.orchestrate.point_jobs import PointJobs
    from redco_flow.orchestrate.sweep_submission import submit_points

    submit_points(sweep, runs, _say)
    return {run.id: PointJobs(run) for run in runs}


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
