"""Bring one stage of a run to its end: reuse a result, find its job again, or submit one.

Nothing runs twice: a result that is published is taken, a job of an earlier process of this run
that still lives is followed, and a fingerprint that another run computes is waited for. Knows
no Prefect; lines for people go to `say`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from redco_flow.errors import RedcoFlowError, RunCancelled, StageFailed
from redco_flow.orchestrate.calls import write_attempt
from redco_flow.orchestrate.claims import claimed, result_set_aside
from redco_flow.orchestrate.ingredients import stage_ingredients
from redco_flow.orchestrate.job_following import follow_job
from redco_flow.orchestrate.planning import input_ids
from redco_flow.orchestrate.run_context import RunContext, Say
from redco_flow.orchestrate.stopping import Detached
from redco_flow.records import write_json
from redco_flow.spec.load import ResolvedStage
from redco_flow.tracking.attempt import AttemptDirectory
from redco_flow.tracking.clock import utc_now
from redco_flow.tracking.fingerprint import fingerprint
from redco_flow.tracking.results import StageResult, find_result

if TYPE_CHECKING:
    from redco_flow.launch.executor import CallJob
    from redco_flow.launch.job import JobStatus

_POLL_SECONDS = 0.25

Made = Mapping[str, Mapping[str, str]]
"""Outputs (artifact id by output name) of stages by name."""


InputIds = dict[str, list[str]]
"""Artifact ids by input slot."""


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


class StageRunner:
    """One stage of one run, in one thread."""

    def __init__(self, context: RunContext, stage: ResolvedStage, say: Say) -> None:
        self._context = context
        self._stage = stage
        self._say = say
        self._book = context.book

    def run(self, made: Made) -> Finished:
        """Bring the stage to its end and write every step of it to the state book.

        Args:
            made: of every upstream stage.

        Raises:
            StageFailed: its job ended without a result; names job, log and last lines.
            RunCancelled: it was cancelled before or while it ran.
            Detached: this process is to end; the stage's job runs on.
        """
        name = self._stage.name
        try:
            ids = input_ids(self._stage, made)
            try:
                finished = self._take_up_earlier_attempt(ids) or self._reuse_or_submit(made, ids)
            except RetryableFailure:
                finished = self._reuse_or_submit(made, ids)
        except RunCancelled as error:
            self._book.set_stage(name, "cancelled", message=str(error))
            raise
        except Exception as error:
            # Whatever it is (a full disk, a deleted input), the run must go on to its end.
            failure = _as_failure(name, error)
            self._book.set_stage(name, "failed", message=str(failure))
            raise failure from error
        self._record(finished)
        return finished

    def _take_up_earlier_attempt(self, ids: InputIds) -> Finished | None:
        """Take what an earlier process of this run left: a result, or a job that still lives."""
        attempt = self._context.run.latest_attempt(self._stage.name)
        call = attempt.read_call() if attempt is not None else None
        if attempt is None or call is None:
            return None
        taken = {slot: [one["id"] for one in given] for slot, given in call["inputs"].items()}
        if taken == ids and (finished := self._result_of(attempt)) is not None:
            return finished
        record = attempt.read_job()
        if record is None or attempt.read_exit() is not None:
            return None
        from redco_flow.launch.executor import reattach
        from redco_flow.launch.job import NEVER_SUBMITTED

        job = reattach(record)
        if job.done() or taken != ids:
            job.cancel()  # of a lost job, this ends what it left behind
            return self._result_of(attempt) if taken == ids else None
        self._say(f"found job {job.job_id} again (attempt {attempt.number})")
        self._set_running("job_reattached", attempt, job)
        try:
            return self._follow(job, attempt)
        except StageFailed:
            if job.status().cause != NEVER_SUBMITTED:
                raise
        self._say(f"attempt {attempt.number} was never submitted")
        return None

    def _reuse_or_submit(self, made: Made, ids: InputIds) -> Finished:
        self._raise_if_stopped()
        ingredients = stage_ingredients(self._stage, ids, self._context.workspace)
        digest = fingerprint(ingredients)
        # Most second runs end here, without a lock or a slot.
        if (finished := self._reuse(digest)) is not None:
            return finished
        self._book.set_stage(self._stage.name, "waiting", fingerprint=digest, message="")
        with claimed(self._context.workspace, digest, self._wait):
            if (finished := self._reuse(digest)) is not None:
                return finished
            with self._slot(), self._old_result_set_aside(digest):
                while True:
                    attempt = write_attempt(self._context, self._stage, made, ingredients, digest)
                    with suppress(RetryableFailure):
                        return self._submit(attempt)
                    self._raise_if_stopped()

    def _reuse(self, digest: str) -> Finished | None:
        if self._is_forced():
            return None
        result = find_result(self._context.workspace, digest)
        if result is None:
            return None
        self._say(f"reused: made by {result.run or 'an earlier run'} in {result.seconds:.1f} s")
        return Finished(result, None)

    def _submit(self, attempt: AttemptDirectory) -> Finished:
        # Imported here: what only plans or reads never pays for it.
        from redco_flow.launch.executor import make_executor

        self._book.note("job_submitting", stage=self._stage.name, attempt=attempt.number)
        executor = make_executor(self._context.profile, self._context.environment)
        job = executor.submit_call(attempt)
        if attempt.read_job() is None:
            write_json(attempt.job_path, job.record())
        self._set_running("job_submitted", attempt, job)
        self._say(f"job {job.job_id} started; log: {attempt.log_path(0)}")
        return self._follow(job, attempt)

    def _set_running(self, event: str, attempt: AttemptDirectory, job: CallJob) -> None:
        fields = {"attempt": attempt.number, "job_id": job.job_id, "message": ""}
        self._book.set_stage(self._stage.name, "running", event=event, **fields)

    def _set_news(self, job: CallJob, status: JobStatus) -> None:
        """What a person sees who asks for the run's status: a job in a queue is not at work."""
        is_waiting = status.state == "pending"
        message = f"job {job.job_id} {status.message}" if is_waiting else ""
        fields = {"message": message, "told_at": utc_now()}
        self._book.set_stage(self._stage.name, "running", event="job_news", **fields)

    def _follow(self, job: CallJob, attempt: AttemptDirectory) -> Finished:
        stop, grace_seconds = self._context.stop, self._context.profile.grace_seconds
        try:
            follow_job(
                job,
                stop,
                self._say,
                grace_seconds=grace_seconds,
                on_news=lambda status: self._set_news(job, status),
            )
        except StageFailed as failure:
            self._raise_if_worth_a_retry(attempt, failure)
            raise
        finished = self._result_of(attempt)
        if finished is None:
            raise StageFailed(
                f"stage '{self._stage.name}': job {job.job_id} ended well, but its result is not "
                f"published or its artifacts are gone; see {attempt.result_path}."
            )
        return finished

    def _raise_if_worth_a_retry(self, attempt: AttemptDirectory, failure: StageFailed) -> None:
        """Raise RetryableFailure if the profile's budget for this ending is not used up.

        The budget is counted from the attempts' own records, so that it outlives this process.
        """
        cause = (attempt.read_exit() or {}).get("cause", "lost")
        attempts = self._context.run.attempts(self._stage.name)
        num_ended = sum((one.read_exit() or {}).get("cause") == cause for one in attempts)
        if not self._context.profile.retries.allows(cause, num_ended):
            return
        self._book.note("job_retried", stage=self._stage.name, attempt=attempt.number, cause=cause)
        self._say(f"attempt {attempt.number} ended: {cause}; trying again (retries in the profile)")
        raise RetryableFailure(str(failure)) from failure

    def _result_of(self, attempt: AttemptDirectory) -> Finished | None:
        """The published result of an attempt, if it has one and its artifacts stand."""
        record = attempt.read_result()
        if record is None:
            return None
        result = find_result(self._context.workspace, record["fingerprint"])
        return Finished(result, attempt.number) if result is not None else None

    def _record(self, finished: Finished) -> None:
        result = finished.result
        self._book.set_stage(
            self._stage.name,
            "completed",
            reused=finished.reused,
            attempt=finished.attempt,
            seconds=0.0 if finished.reused else result.seconds,
            artifacts=dict(result.outputs),
            metrics=result.metrics,
            fingerprint=result.fingerprint,
            message=f"made by {result.run}" if finished.reused and result.run else "",
        )

    def _is_forced(self) -> bool:
        """Whether the stage must run although its result stands, and has not run since."""
        plan = self._context.plan.stages.get(self._stage.name)
        return plan is not None and plan.forced

    def _wait(self, for_what: str) -> None:
        """Sleep a moment in a queue."""
        if self._book.stage(self._stage.name).get("message") != f"waits for {for_what}":
            self._say(f"waits for {for_what}")
            self._book.set_stage(self._stage.name, "waiting", message=f"waits for {for_what}")
        self._context.stop.wait(_POLL_SECONDS)
        self._raise_if_stopped()

    @contextmanager
    def _slot(self) -> Iterator[None]:
        """Hold one of the profile's `max_parallel_stages`."""
        while not self._context.slots.acquire(blocking=False):
            self._wait("a free slot (max_parallel_stages)")
        try:
            yield
        finally:
            self._context.slots.release()

    def _old_result_set_aside(self, digest: str) -> AbstractContextManager[None]:
        if self._is_forced():
            return result_set_aside(self._context.workspace, digest)
        return nullcontext()

    def _raise_if_stopped(self) -> None:
        stop = self._context.stop
        if stop.kind == "detach":
            raise Detached(stop.reason)
        if stop.kind == "cancel":
            raise RunCancelled(f"stage '{self._stage.name}' was cancelled: {stop.reason}")


def _as_failure(stage: str, error: Exception) -> StageFailed:
    if isinstance(error, StageFailed):
        return error
    said = str(error) if isinstance(error, RedcoFlowError) else f"{type(error).__name__}: {error}"
    return StageFailed(f"stage '{stage}': {said}")
