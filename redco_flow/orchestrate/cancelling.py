"""Stop a run from any process: ask its launcher, or end the jobs of a launcher that is gone."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from redco_flow.errors import RunCancelled, UsageError
from redco_flow.launch.ending import unstarted_record
from redco_flow.orchestrate.state_book import (
    ENDED_RUN_STATES,
    ENDED_STAGE_STATES,
    StateBook,
    note_takeover,
)
from redco_flow.records import write_json
from redco_flow.tracking.clock import utc_now
from redco_flow.tracking.lease import acquire, find_holder
from redco_flow.tracking.run_directory import RunDirectory

if TYPE_CHECKING:
    from redco_flow.launch.executor import CallJob

_POLL_SECONDS = 0.1


def cancel_run(run: RunDirectory, reason: str = "", *, wait_seconds: float | None = None) -> bool:
    """Ask for the run to stop; where nobody drives it, end its jobs here.

    Args:
        reason: for people.
        wait_seconds: return after so long at the latest; None waits for the end.

    Returns:
        Whether the run has ended.

    Raises:
        UsageError: it has ended already.
    """
    state = run.read_state()["state"]
    if state in ENDED_RUN_STATES:
        raise UsageError(f"run {run.id} has ended already: it is {state}.")
    run.request_cancel(reason)
    deadline = None if wait_seconds is None else time.monotonic() + wait_seconds
    while run.read_state()["state"] not in ENDED_RUN_STATES:
        if find_holder(run) is None:
            _cancel_without_launcher(run, reason)
        elif deadline is not None and time.monotonic() > deadline:
            return False
        else:
            time.sleep(_POLL_SECONDS)
    return True


def _note_end(job: CallJob, why: str) -> None:
    """Of a job that left the queue without a word, say so where whoever resumes the run looks."""
    if job.attempt.read_exit() is None and job.status().state == "cancelled":
        write_json(job.attempt.exit_path, unstarted_record(why, utc_now()))


def _cancel_without_launcher(run: RunDirectory, reason: str) -> None:
    """Do the launcher's part, under its lease: end the jobs, then write what became of them."""
    from redco_flow.launch.executor import reattach

    with acquire(run) as lease:
        note_takeover(run, lease)
        book = StateBook(run)
        if run.read_state()["state"] in ENDED_RUN_STATES:
            return
        message = f"cancelled{f': {reason}' if reason else ''}"
        jobs = {}
        for stage in book.stages():
            attempt = run.latest_attempt(stage)
            if attempt is None or attempt.read_exit() or not (record := attempt.read_job()):
                continue
            jobs[stage] = reattach(record)
            jobs[stage].cancel(check=False)
        for stage, known in book.stages().items():
            if stage in jobs:
                jobs[stage].wait()
                _note_end(jobs[stage], message)
            if known["state"] not in ENDED_STAGE_STATES:
                book.set_stage(stage, "cancelled", message=message)
        book.close_run("cancelled", RunCancelled.exit_code, message)
        run.clear_cancel()
