"""The process that drives a sweep's runs: `python -m redco_flow.orchestrate.sweep.process SWEEP`.

Detached, so it outlives the terminal. Drives each run that has not ended and has no orchestrator,
at most `max_parallel` at a time, all in this process; where a sampler chooses the points, it makes
the next one when there is room for it. If the process dies, jobs run on, and `resume_sweep`
continues the runs.

Where the cluster supports job dependencies, the jobs of all points are submitted first. From then
on no process is needed; a run is driven when one of its jobs has begun. Of packed points
(`sweep.packs`), a run is driven when its turn has come.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from redco_flow.errors import RedcoFlowError
from redco_flow.orchestrate.prefect.sweep_page import SweepPage
from redco_flow.orchestrate.run.cancel import cancel_runs, has_ended
from redco_flow.orchestrate.run.driver import Driver
from redco_flow.orchestrate.run.orchestrator import run_and_exit
from redco_flow.orchestrate.sweep.control import request_cancel
from redco_flow.orchestrate.sweep.early_stopping import SweepEarlyStopping
from redco_flow.orchestrate.sweep.packs import Packs
from redco_flow.orchestrate.sweep.search import PointMaker
from redco_flow.orchestrate.sweep.submission import PointJobs, submit_points
from redco_flow.tracking.locks import acquire, find_holder
from redco_flow.tracking.process_identity import utc_now
from redco_flow.tracking.run_directory import RunDirectory
from redco_flow.tracking.sweep_directory import SweepDirectory

_POLL_SECONDS = 0.5
_PAUSE_PER_LOOK = 9.0
_MAX_PAUSE = 10.0
_SECONDS_FOR_OTHER_ENDS = 1.0  # a job writes those of its points one after the other
_SECONDS_FOR_PREFECT_TO_CLOSE = 180.0


def main(arguments: Sequence[str]) -> int:
    """Drive all runs, in order; return when all have ended."""
    sweep, driver = SweepDirectory(Path(arguments[0])), Driver()
    driver.take_signals()
    with SweepPage(sweep, on_cancel=partial(_cancel, sweep)) as page:
        try:
            with acquire(sweep):
                _drive_runs(sweep, driver)
        except RedcoFlowError as error:
            _log(str(error))
            return error.exit_code
        finally:
            driver.wait()
            if page.is_cancelled:  # the points that had not started, and their jobs in the queue
                cancel_runs(reversed(sweep.runs), page.reason)
            page.close(_SECONDS_FOR_PREFECT_TO_CLOSE)
    return 0


def _cancel(sweep: SweepDirectory, reason: str) -> None:
    request_cancel(sweep, reason)
    for run in sweep.runs:
        if not has_ended(run):
            run.request_cancel(reason)


def _drive_runs(sweep: SweepDirectory, driver: Driver) -> None:
    left = [run for run in sweep.runs if not has_ended(run)]
    elsewhere = [run for run in left if find_holder(run) is not None]
    waiting = [run for run in left if run not in elsewhere]
    early = SweepEarlyStopping(sweep, _log) if sweep.record.get("early_stopping") else None
    if early is not None:
        for run in {*sweep.runs} - {*waiting}:
            early.watch(run)
    stopped = {run.id for run in waiting if early is not None and early.has_stopped(run)}
    to_submit = [run for run in waiting if run.id not in stopped]
    packs = Packs(sweep, to_submit, _log, driver) if sweep.points_per_job else None
    jobs = _submit(sweep, to_submit, driver) if sweep.is_ahead and packs is None else {}
    maker = PointMaker(sweep, _log) if sweep.search is not None else None
    while not sweep.cancel_path.exists() and not driver.is_stopped:
        if early is not None:
            early.look()
        if packs is not None:
            jobs |= {run.id: PointJobs(run) for run in packs.submit()}
        elsewhere = [run for run in elsewhere if find_holder(run) is not None]
        num_at_work = driver.num_driving + len(elsewhere)
        looked_at = time.monotonic()
        has_room = num_at_work < sweep.record["max_parallel"]
        if maker is not None and not waiting and has_room and maker.is_due:
            waiting += filter(None, [maker.make()])
            continue
        if not waiting and not num_at_work and not (maker is not None and maker.is_open):
            if maker is not None:
                maker.record_scores()
            return
        ready = _next_ready(waiting, jobs, packs) if has_room else None
        if ready is None:
            # Of thousands of points a look takes its time.
            seconds = _PAUSE_PER_LOOK * (time.monotonic() - looked_at)
            driver.wait_for_an_end(min(max(seconds, _POLL_SECONDS), _MAX_PAUSE))
            continue
        if packs is not None and _put_back(ready, waiting, jobs, packs, driver):
            continue
        waiting.remove(ready)
        # It may have been cancelled while it waited. The retry budgets apply to what ended before.
        judges_ended = bool(jobs) or ready.id in stopped
        if not has_ended(ready) and not _start(ready, driver, judges_ended=judges_ended):
            elsewhere.append(ready)
        elif early is not None:
            early.watch(ready)
        driver.wait_for_an_end(0)


def _next_ready(
    waiting: Sequence[RunDirectory], jobs: Mapping[str, PointJobs], packs: Packs | None
) -> RunDirectory | None:
    """Return a run that may start: at any time, or when its jobs need an orchestrator."""
    waiting_packs: set[str] = set()  # whose next point has not begun
    held = packs.held if packs is not None else ()
    for run in sorted(waiting, key=lambda one: jobs[one.id].turn if one.id in jobs else 0):
        if run.id in held:
            continue
        known = jobs.get(run.id)
        if known is None:
            return run
        if known.pack in waiting_packs:
            continue
        if known.need_orchestrator():
            return run
        if known.pack is not None:
            waiting_packs.add(known.pack)
    return None


def _put_back(
    run: RunDirectory,
    waiting: Sequence[RunDirectory],
    jobs: Mapping[str, PointJobs],
    packs: Packs,
    driver: Driver,
) -> bool:
    """Have a run whose packed job has ended before its turn packed again, and others with it.

    Returns:
        Whether it is.
    """
    its = jobs.get(run.id)
    if its is None or its.pack is None or has_ended(run) or not its.are_left_over:
        return False
    driver.wait_for_an_end(_SECONDS_FOR_OTHER_ENDS)
    known = [(one, jobs[one.id]) for one in waiting if one.id in jobs]
    left = [one for one, others in known if others.pack == its.pack and others.are_left_over]
    return packs.put_back(left, its.pack)


def _submit(
    sweep: SweepDirectory, runs: Sequence[RunDirectory], driver: Driver
) -> dict[str, PointJobs]:
    submit_points(sweep, runs, _log, driver)
    return {run.id: PointJobs(run) for run in runs}


def _start(run: RunDirectory, driver: Driver, *, judges_ended: bool) -> bool:
    """Begin to drive a run; where that cannot be, the log says why, and the other runs go on."""
    _log(f"starts {run.id}")
    try:
        driver.start(run, judges_ended=judges_ended)
    except (RedcoFlowError, OSError) as error:
        _log(str(error))
        return False
    return True


def _log(line: str) -> None:
    sys.stderr.write(f"{utc_now()} {line}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    run_and_exit(main)
