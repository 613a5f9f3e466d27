"""Bring one stage of a run to its end: reuse a result, find its job again, or submit one.

Nothing runs twice: a result that is published is taken, a job of an earlier process of this run
that still lives is followed, and a fingerprint that another run computes is waited for. Knows
no Prefect; lines for people go to `say`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress

from redco_flow.errors import StageFailed
from redco_flow.orchestrate.attempt_following import (
    AttemptFollower,
    Finished,
    RetryableFailure,
    failures_recorded,
    record_completed,
)
from redco_flow.orchestrate.calls import write_attempt
from redco_flow.orchestrate.claims import claimed, result_set_aside
from redco_flow.orchestrate.ingredients import stage_ingredients
from redco_flow.orchestrate.planning import input_ids
from redco_flow.orchestrate.run_context import RunContext, Say
from redco_flow.records import write_json
from redco_flow.spec.load import ResolvedStage
from redco_flow.tracking.attempt import AttemptDirectory
from redco_flow.tracking.fingerprint import fingerprint
from redco_flow.tracking.results import find_result, is_doubtful

_POLL_SECONDS = 0.25

Made = Mapping[str, Mapping[str, str]]
"""Outputs (artifact id by output name) of stages by name."""


InputIds = dict[str, list[str]]
"""Artifact ids by input slot."""


class StageRunner:
    """One stage of one run, in one thread."""

    def __init__(self, context: RunContext, stage: ResolvedStage, say: Say) -> None:
        self._context = context
        self._stage = stage
        self._say = say
        self._book = context.book
        self._follower = AttemptFollower(context, stage.name, say)

    def run(self, made: Made) -> Finished:
        """Bring the stage to its end and write every step of it to the state book.

        Args:
            made: of every upstream stage.

        Raises:
            StageFailed: its job ended without a result; names job, log and last lines.
            RunCancelled: it was cancelled before or while it ran.
            Detached: this process is to end; the stage's job runs on.
        """
        with failures_recorded(self._book, self._stage.name):
            ids = input_ids(self._stage, made)
            try:
                finished = self._take_up_earlier_attempt(ids) or self._reuse_or_submit(made, ids)
            except RetryableFailure:
                finished = self._reuse_or_submit(made, ids)
        record_completed(self._book, self._stage.name, finished)
        return finished

    def _take_up_earlier_attempt(self, ids: InputIds) -> Finished | None:
        """Take what an earlier process of this run left: a result, or a job that still lives."""
        attempt = self._context.run.latest_attempt(self._stage.name)
        call = attempt.read_call() if attempt is not None else None
        if attempt is None or call is None:
            return None
        taken = {slot: [one["id"] for one in given] for slot, given in call["inputs"].items()}
        if taken == ids and (finished := self._follower.result_of(attempt)) is not None:
            return finished
        record = attempt.read_job()
        if record is None or attempt.read_exit() is not None:
            return None
        from redco_flow.launch.executor import reattach
        from redco_flow.launch.job import UNSEEN

        job = reattach(record)
        if job.done() or taken != ids:
            job.cancel()  # of a lost job, this ends what it left behind
            return self._follower.result_of(attempt) if taken == ids else None
        self._say(f"found job {job.job_id} again (attempt {attempt.number})")
        try:
            return self._follower.follow("job_reattached", attempt, job)
        except StageFailed:
            status = job.status()
            if status.cause not in UNSEEN:
                raise
        self._say(f"attempt {attempt.number} is gone: {status.message}")
        return None

    def _reuse_or_submit(self, made: Made, ids: InputIds) -> Finished:
        self._context.stop.raise_if_set(self._stage.name)
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
                    self._context.stop.raise_if_set(self._stage.name)

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
        self._say(f"job {job.job_id} started; log: {job.paths.stdout}")
        return self._follower.follow("job_submitted", attempt, job)

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
        self._context.stop.raise_if_set(self._stage.name)

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
        if self._is_forced() or is_doubtful(self._context.workspace, digest):
            return result_set_aside(self._context.workspace, digest)
        return nullcontext()
