"""What a stage's runner does with an attempt that has a job: follow it, judge it, write it down.

The job may have been submitted by any process at any time. Knows the budgets of retries, and
starts nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from redco_flow.errors import RedcoFlowError, RunCancelled, StageFailed
from redco_flow.orchestrate.job_following import follow_job
from redco_flow.orchestrate.run_context import RunContext, Say
from redco_flow.orchestrate.state_book import StateBook
from redco_flow.tracking.attempt import AttemptDirectory
from redco_flow.tracking.clock import utc_now
from redco_flow.tracking.results import StageResult, find_new_result, find_result
from redco_flow.tracking.states import Cause, State

if TYPE_CHECKING:
    from redco_flow.launch.executor import CallJob
    from redco_flow.launch.job import JobStatus


@dataclass(frozen=True)
class Finished:
    """A stage that has its result.

    Args:
        attempt: this run's attempt that made it; None if it was reused.
    """

    result: StageResult
    attempt: int | None

    @property
    def reused(self) -> bool:
        """Whether nothing had to run."""
        return self.attempt is None


class RetryableFailure(Exception):
    """An attempt failed, and the profile allows another one."""


@dataclass(frozen=True)
class AttemptFollower:
    """Follows the attempts of one stage of one run."""

    context: RunContext
    stage: str
    say: Say

    def follow(self, event: str, attempt: AttemptDirectory, job: CallJob) -> Finished:
        """Return when the attempt's job has ended with a result.

        Args:
            event: how the journal calls it that the stage has this job now.

        Raises:
            RetryableFailure: it failed, and may be tried again.
            StageFailed: it failed for good; names job, log and last lines.
            RunCancelled: it was cancelled.
            Detached: this process is to end; the job runs on.
        """
        fields = {"attempt": attempt.number, "job_id": job.job_id, "message": ""}
        self.context.book.set_stage(self.stage, State.RUNNING, event=event, **fields)
        try:
            follow_job(
                job,
                self.context.stop,
                self.say,
                grace_seconds=self.context.profile.grace_seconds,
                on_news=lambda status: self._set_news(job, status),
            )
        except StageFailed as failure:
            self._raise_if_worth_a_retry(attempt, failure)
            raise
        finished = self.result_of(attempt, is_new=True)
        if finished is None:
            raise StageFailed(
                f"stage '{self.stage}': job {job.job_id} ended well, but its result is not "
                f"published or its artifacts are gone; see {attempt.result_path}."
            )
        return finished

    def result_of(self, attempt: AttemptDirectory, *, is_new: bool = False) -> Finished | None:
        """Return the published result of an attempt, if it has one that can be trusted.

        Args:
            is_new: made just now; the stage that reads it verifies it, on a machine made for work.
        """
        record = attempt.read_result()
        if record is None:
            return None
        find = find_new_result if is_new else find_result
        result = find(self.context.workspace, record["fingerprint"])
        return Finished(result, attempt.number) if result is not None else None

    def _set_news(self, job: CallJob, status: JobStatus) -> None:
        """What a person sees who asks for the run's status: a job in a queue is not at work."""
        is_waiting = status.state is State.PENDING
        message = f"job {job.job_id} {status.message}" if is_waiting else ""
        fields = {"message": message, "told_at": utc_now()}
        self.context.book.set_stage(self.stage, State.RUNNING, event="job_news", **fields)

    def _raise_if_worth_a_retry(self, attempt: AttemptDirectory, failure: StageFailed) -> None:
        """Raise RetryableFailure if the profile's budget for this ending is not used up.

        The budget is counted from the attempts' own records, so that it outlives this process.
        """
        cause = attempt.cause or Cause.LOST
        num_ended = sum(one.cause is cause for one in self.context.run.attempts(self.stage))
        if not self.context.profile.retries.allows(cause, num_ended):
            return
        self.context.book.note("job_retried", stage=self.stage, attempt=attempt.number, cause=cause)
        self.say(f"attempt {attempt.number} ended: {cause}; trying again (retries in the profile)")
        raise RetryableFailure(str(failure)) from failure


@contextmanager
def failures_recorded(book: StateBook, stage: str) -> Iterator[None]:
    """Write into the state book how bringing the stage to its end went wrong, if it does.

    Raises:
        StageFailed: for whatever it was (a full disk, a deleted input): the run must go on.
        RunCancelled: as it came.
    """
    try:
        yield
    except RunCancelled as error:
        book.set_stage(stage, State.CANCELLED, message=str(error))
        raise
    except (Exception, SystemExit) as error:  # code of the user's may call sys.exit
        failure = _as_failure(stage, error)
        book.set_stage(stage, State.FAILED, message=str(failure))
        raise failure from error


def record_completed(book: StateBook, stage: str, finished: Finished) -> None:
    """Write into the state book what the stage made, or whose result it reuses."""
    result = finished.result
    made_by = {"run": result.run, "stage": result.stage, "attempt": result.attempt}
    book.set_stage(
        stage,
        State.COMPLETED,
        reused=finished.reused,
        attempt=finished.attempt,
        seconds=0.0 if finished.reused else result.seconds,
        artifacts=dict(result.outputs),
        metrics=result.metrics,
        fingerprint=result.fingerprint,
        made_by=made_by if finished.reused and result.run else None,
        message=f"made by {result.run}" if finished.reused and result.run else "",
    )


def _as_failure(stage: str, error: BaseException) -> StageFailed:
    if isinstance(error, StageFailed):
        return error
    said = str(error) if isinstance(error, RedcoFlowError) else f"{type(error).__name__}: {error}"
    return StageFailed(f"stage '{stage}': {said}")
