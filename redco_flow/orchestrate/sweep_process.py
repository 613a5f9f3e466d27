"""The process that starts a sweep's runs: `python -m redco_flow.orchestrate.sweep_process SWEEP`.

In a session of its own, so it outlives the terminal. Starts each run that has not ended and that
nobody drives, once, so many at a time; each run is driven by its own process. If this one dies, the
runs go on, and `resume_sweep` starts the others.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from redco_flow.errors import RedcoFlowError
from redco_flow.orchestrate.starting import spawn
from redco_flow.orchestrate.sweeping import has_ended
from redco_flow.tracking.clock import utc_now
from redco_flow.tracking.lease import acquire, find_holder
from redco_flow.tracking.run_directory import RunDirectory
from redco_flow.tracking.sweep_directory import SweepDirectory

_POLL_SECONDS = 0.3


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
    while not sweep.cancel_path.exists():
        at_work = [run for run in sweep.runs if find_holder(run) is not None]
        if not waiting and not at_work:
            return
        if waiting and len(at_work) < sweep.record["max_parallel"]:
            _start(waiting.pop(0))
        else:
            time.sleep(_POLL_SECONDS)


def _start(run: RunDirectory) -> None:
    """Start one run; where it cannot be, its own log says why, and the others have their turn."""
    _say(f"starts {run.id}")
    try:
        spawn(run)
    except RedcoFlowError as error:
        _say(str(error))


def _say(line: str) -> None:
    sys.stderr.write(f"{utc_now()} {line}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
