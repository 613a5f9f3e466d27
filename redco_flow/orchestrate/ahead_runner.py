"""Bring one stage to its end whose job was submitted before its inputs were made.

The counterpart of `stage_runner` for a run ahead: nothing is submitted here except again, after
a failure that the profile allows to be tried again.
"""

from __future__ import annotations

from contextlib import suppress

from redco_flow.errors import RunCancelled, StageFailed
from redco_flow.launch.call import read_call, write_call
from redco_flow.launch.upstream import with_inputs
from redco_flow.orchestrate.ahead import AheadChain
from redco_flow.orchestrate.attempt_following import (
    AttemptFollower,
    Finished,
    RetryableFailure,
    failures_recorded,
    record_completed,
)
from redco_flow.orchestrate.run_context import RunContext, Say
from redco_flow.tracking.attempt import AttemptDirectory

_POLL_SECONDS = 0.25


class AheadRunner:
    """One stage of a run ahead, in one thread."""

    def __init__(self, context: RunContext, stage: str, chain: AheadChain, say: Say) -> None:
        self._context = context
        self._stage = stage
        self._chain = chain
        self._say = say
        self._follower = AttemptFollower(context, stage, say)

    def run(self) -> Finished:
        """Follow the stage's job, and those that follow it, to the stage's end.

        Every stage it takes from must have come to its own end.

        Raises:
            StageFailed: its job ended without a result; names job, log and last lines.
            RunCancelled: it was cancelled before or while it ran.
            Detached: this process is to end; the stage's job runs on.
        """
        try:
            with failures_recorded(self._context.book, self._stage):
                finished = self._follow_until_finished()
        except (StageFailed, RunCancelled) as error:
            verb = "was cancelled" if isinstance(error, RunCancelled) else "failed"
            self._chain.end_behind(self._stage, f"upstream {self._stage} {verb}")
            raise
        record_completed(self._context.book, self._stage, finished)
        return finished

    def _follow_until_finished(self) -> Finished:
        while True:
            attempt = self._chain.attempt_of(self._stage)
            if self._chain.is_shared(attempt):
                finished = self._wait_for_other_run(attempt)
            else:
                finished = self._follow_own(attempt)
            if finished is not None:
                return finished
            self._context.stop.raise_if_set(self._stage)
            self._chain.submit_again(self._stage, self._say)

    def _wait_for_other_run(self, attempt: AttemptDirectory) -> Finished | None:
        """Wait for the end of another run's job; None where it made no result."""
        from redco_flow.launch.executor import reattach

        job = reattach(attempt.read_job() or {})
        text = f"waits for job {job.job_id} of run {read_call(attempt.call_path).run}"
        self._say(text)
        self._context.book.set_stage(self._stage, "waiting", message=text)
        while not job.done():
            self._context.stop.wait(_POLL_SECONDS)
            self._context.stop.raise_if_set(self._stage)
        finished = self._follower.result_of(attempt)
        return None if finished is None else Finished(finished.result, attempt=None)

    def _follow_own(self, attempt: AttemptDirectory) -> Finished | None:
        """Follow one attempt of this run; None where there is to be another one."""
        _write_known_inputs(attempt)
        with suppress(RetryableFailure):
            return self._follow(attempt)
        return None

    def _follow(self, attempt: AttemptDirectory) -> Finished | None:
        """Follow one attempt; None where it is another launcher's and its end was never seen."""
        from redco_flow.launch.executor import reattach
        from redco_flow.launch.job import UNSEEN

        is_found_again = not self._chain.has_submitted(attempt)
        if is_found_again and (finished := self._follower.result_of(attempt)) is not None:
            return finished
        job = reattach(attempt.read_job() or {})
        try:
            return self._follower.follow("job_followed", attempt, job)
        except StageFailed:
            status = job.status()
            if status.cause not in UNSEEN or not is_found_again:
                raise
        self._say(f"attempt {attempt.number} is gone: {status.message}")
        return None


def _write_known_inputs(attempt: AttemptDirectory) -> None:
    """Complete call.json: who reads it later finds what the job found."""
    call = read_call(attempt.call_path)
    if call.upstream:
        write_call(attempt, with_inputs(call))
