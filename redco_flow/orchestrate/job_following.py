"""Follow one job to its end: its log lines as they appear, a request to stop handed on.

Works on any executor's job, started here or found again. Knows nothing of results.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from redco_flow.errors import RunCancelled, StageFailed
from redco_flow.orchestrate.log_lines import LogTail
from redco_flow.orchestrate.run_context import Say
from redco_flow.orchestrate.stopping import Detached, StopRequest

if TYPE_CHECKING:
    from redco_flow.launch.executor import CallJob
    from redco_flow.launch.job import JobStatus

_POLL_SECONDS = 0.25
_EXTRA_SECONDS_TO_STOP = 60.0


def follow_job(
    job: CallJob,
    stop: StopRequest,
    say: Say,
    *,
    grace_seconds: float,
    on_news: Callable[[JobStatus], None],
) -> None:
    """Return when the job has ended with a result; its log lines go to `say` as they appear.

    A request to cancel is handed on to the job, which then has its grace to save.

    Args:
        on_news: called when there is news: it waits in a queue, and why; it runs, and where.

    Raises:
        StageFailed: it ended without a result; names job id, log and last lines.
        RunCancelled: it was cancelled, by the run's stop request or from outside redco-flow.
        Detached: this process is to end; the job runs on.
    """
    tail = LogTail(job.paths.stdout)
    give_up_at: float | None = None
    told = ""
    while True:
        # Before the log: what it printed before its end is then all there.
        status = job.status()
        finished = status.is_finished
        if status.news and status.news != told:
            told = status.news
            say(f"job {job.job_id} {told}")
            on_news(status)
        for line in tail.last_lines() if finished else tail.new_lines():
            say(line)
        if finished:
            break
        if give_up_at is not None:
            _doze_until(job, give_up_at)
        elif stop.wait(_POLL_SECONDS):
            give_up_at = time.monotonic() + grace_seconds + _EXTRA_SECONDS_TO_STOP
            _stop(job, stop, say)
    _raise_unless_completed(job, stop)


def _stop(job: CallJob, stop: StopRequest, say: Say) -> None:
    if stop.kind == "detach":
        raise Detached(stop.reason)
    say(f"cancelling job {job.job_id}: {stop.reason}")
    job.cancel(check=False)


def _doze_until(job: CallJob, give_up_at: float) -> None:
    """Wait a moment for a cancelled job.

    Raises:
        RunCancelled: it should have ended long ago; it is left to the cluster.
    """
    if time.monotonic() > give_up_at:
        raise RunCancelled(f"job {job.job_id} was cancelled but does not end; look for it there.")
    job.wait_seconds(_POLL_SECONDS)


def _raise_unless_completed(job: CallJob, stop: StopRequest) -> None:
    error = job.exception()
    if error is None:
        return
    if not isinstance(error, RunCancelled):
        raise StageFailed(str(error))
    if stop.kind == "cancel":
        raise RunCancelled(f"stage '{job.attempt.stage}' was cancelled: {stop.reason}.")
    raise RunCancelled(str(error))
