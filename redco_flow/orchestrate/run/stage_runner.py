"""Bring one stage of a run to its end: reuse a result, find its job again, or submit one.

Nothing runs twice: a result that is published is taken, a job of an earlier process of this run
that still lives is followed, and a fingerprint that another run computes is waited for. A stage
of a run ahead has been submitted by its chain and is followed here in the same way. Knows no
Prefect; lines for people go to `log`.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from redco_flow.errors import StageFailed
from redco_flow.launch.call import read_call, with_inputs, write_call
from redco_flow.orchestrate.run.ahead import JobChain
from redco_flow.orchestrate.run.attempts import (
    AttemptFollower,
    Finished,
    RetryableFailure,
    StageAttempts,
    claim_for_stage,
    claim_path,
    failures_recorded,
    record_completed,
    request_claim,
)
from redco_flow.orchestrate.run.calls import write_attempt
from redco_flow.orchestrate.run.cancel import Log, RunContext
from redco_flow.orchestrate.run.groups import next_in_job, note_rest, write_rest
from redco_flow.orchestrate.run.plan import describe
from redco_flow.records import write_json
from redco_flow.runtime.context import FinishedStage
from redco_flow.spec.load import ResolvedStage
from redco_flow.spec.stage_kind import find_stage_kind
from redco_flow.tracking.attempt import AttemptDirectory, Cause, State
from redco_flow.tracking.file_lock import LockRequest
from redco_flow.tracking.locks import is_locked
from redco_flow.tracking.results import differences, is_doubtful, read_result
from redco_flow.tracking.workspace import Workspace

if TYPE_CHECKING:
    from redco_flow.launch.executor import CallJob


@contextmanager
def fingerprint_locked(
    workspace: Workspace, fingerprint: str, wait: Callable[[str], None]
) -> Iterator[None]:
    """Hold the launchers' lock of a fingerprint; call `wait` again and again until it is free.

    Args:
        wait: sleeps a moment and may raise to give up; gets the name of what it waits for.
    """
    request = request_claim(workspace, fingerprint)
    while (claim := request.try_once()) is None:
        wait("another run that makes the same result")
    try:
        path = workspace.work_directory(fingerprint) / "lock"
        work = LockRequest(path)
        while is_locked(path, work):
            wait("a job of another run that makes the same result")
        claim.check()
        yield
    finally:
        claim.release()


@contextmanager
def result_set_aside(workspace: Workspace, fingerprint: str) -> Iterator[None]:
    """Make a fingerprint new again for a forced run; without a new result the old one returns.

    The work directory goes for good: a stage that found its checkpoints there would have
    nothing left to do. Call it with the lock held.
    """
    published = workspace.results / f"{fingerprint}.json"
    aside = published.with_suffix(".set-aside")
    if published.exists():
        published.replace(aside)
    _remove(workspace.work_directory(fingerprint))
    try:
        yield
    finally:
        if published.exists():
            aside.unlink(missing_ok=True)
        elif aside.exists():
            aside.replace(published)


def _remove(folder: Path) -> None:
    """Under another name first: half a work directory must not pass for a whole one."""
    if folder.exists():
        doomed = folder.with_name(f".{folder.name}.{os.getpid()}.removed")
        folder.replace(doomed)
        shutil.rmtree(doomed)


_POLL_SECONDS = 0.25
_SECONDS_TO_CLAIM_NEXT = 10.0
_MOST_CHANGES = 3  # that are named in the log


class StageRunner:
    """One stage of one run, in one thread.

    Args:
        attempts: the run's; has the outputs of every upstream stage.
        chain: of a run ahead: the jobs that its stages have.
    """

    def __init__(
        self,
        context: RunContext,
        stage: ResolvedStage,
        attempts: StageAttempts,
        log: Log,
        job_log: Log,
        chain: JobChain | None = None,
    ) -> None:
        self._context = context
        self._stage = stage
        self._attempts = attempts
        self._log = log
        self._chain = chain
        self._state_store = context.state_store
        self._follower = AttemptFollower(context, stage.name, log, job_log)

    def run(self) -> Finished:
        """Bring the stage to its end and write every step of it to the state state_store.

        Every stage it takes from must have come to its own end.

        Raises:
            StageFailed: its job ended without a result; names job, log and last lines.
            RunCancelled: it was cancelled before or while it ran.
            Detached: this process is to end; the stage's job runs on.
        """
        try:
            with failures_recorded(self._state_store, self._stage.name):
                finished = self._follow_what_is_submitted() or self._reuse_or_submit()
                said = self._conclude(finished)
        finally:
            self._attempts.release(self._stage.name)
        record_completed(self._state_store, self._stage.name, finished, said)
        return finished

    def _conclude(self, finished: Finished) -> str:
        """Do what the stage's kind leaves to the launcher; return what came of it."""
        conclude = find_stage_kind(self._stage.kind).conclude
        if conclude is None:
            return ""
        context = self._context
        given = FinishedStage(
            context.workspace, context.pipeline.name, context.run.id, finished.result
        )
        said = conclude(self._stage.config, given)
        if said:
            self._log(said)
        return said

    def _follow_what_is_submitted(self) -> Finished | None:
        """Follow the stage's job, and those that its chain submits after it.

        Returns:
            None where the stage has no job, or needs another one.
        """
        attempt = self._submitted_attempt()
        while attempt is not None:
            if (finished := self._follow_submitted(attempt)) is not None:
                self._hand_over()
                return finished
            self._context.stop.raise_if_set(self._stage.name)
            attempt = self._chain.submit_again(self._stage.name, self._log) if self._chain else None
        return None

    def _submitted_attempt(self) -> AttemptDirectory | None:
        """Return what the chain has submitted, or what an earlier process of this run has."""
        if self._chain is not None:
            return self._chain.attempt_of(self._stage.name)
        if (attempt := self._attempts.current.get(self._stage.name)) is not None:
            return attempt  # in the job of its group
        outdated = self._attempts.find_again(self._stage.name)
        if outdated is not None and outdated.read_exit() is None:
            from redco_flow.launch.executor import reattach

            reattach(outdated.read_job() or {}).cancel()
        return self._attempts.current.get(self._stage.name)

    def _follow_submitted(self, attempt: AttemptDirectory) -> Finished | None:
        """Follow one attempt; None where there is to be another one."""
        from redco_flow.launch.executor import make_executor, reattach

        self._attempts.handed_over.discard(self._stage.name)
        record = attempt.read_job() or {}
        job = self._chain.job_of(attempt) if self._chain is not None else reattach(record)
        if self._attempts.is_of_another_run(attempt):
            return self._wait_for_other_run(attempt, job)
        if job.is_unsubmitted:
            executor = make_executor(
                self._context.profile_of(self._stage.name), self._context.environment
            )
            executor.take_over(job)
        _write_known_inputs(attempt)
        if self._chain is None:
            self._attempts.claim(attempt)
        is_found_again = self._attempts.is_found_again(attempt)
        if is_found_again and (finished := self._follower.result_of(attempt)) is not None:
            return finished
        if is_found_again:
            self._log(f"found job {job.job_id} again (attempt {attempt.number})")
        try:
            event = "job_reattached" if is_found_again else "job_followed"
            return self._follow(event, attempt, job)
        except RetryableFailure:
            return None
        except StageFailed:
            status = job.status()
            is_unobserved = status.cause is not None and status.cause.is_unobserved
            if not is_unobserved or not is_found_again:
                raise
        self._log(f"attempt {attempt.number} is gone: {status.message}")
        return None

    def _wait_for_other_run(self, attempt: AttemptDirectory, job: CallJob) -> Finished | None:
        """Wait for the end of another run's job; None where it made no result."""
        text = f"waits for job {job.job_id} of run {read_call(attempt.call_path).run}"
        self._log(text)
        self._state_store.set_stage(self._stage.name, State.WAITING, message=text)
        while not job.done():
            self._context.stop.wait(_POLL_SECONDS)
            self._context.stop.raise_if_set(self._stage.name)
        with suppress(StageFailed):  # without its result, this run makes its own
            if job.status().cause is Cause.COMPLETED:
                return Finished(self._follower.await_result(attempt, job), attempt=None)
        return None

    def _reuse_or_submit(self) -> Finished:
        self._context.stop.raise_if_set(self._stage.name)
        self._attempts.release(self._stage.name)
        ingredients, digest = self._attempts.ingredients(self._stage.name)
        self._wait_for_next_claim(digest)
        # Most second runs end here, without a lock or a slot.
        if (finished := self._reuse(digest)) is not None:
            return finished
        self._state_store.set_stage(self._stage.name, State.WAITING, fingerprint=digest, message="")
        with fingerprint_locked(self._context.workspace, digest, self._wait):
            if (finished := self._reuse(digest)) is not None:
                return finished
            self._note_changes(ingredients, digest)
            with self._slot(), self._old_result_set_aside(digest):
                while True:
                    made = self._attempts.made
                    attempt = write_attempt(self._context, self._stage, made, ingredients, digest)
                    with suppress(RetryableFailure):
                        finished = self._submit(attempt)
                        self._hand_over()
                        return finished
                    self._context.stop.raise_if_set(self._stage.name)

    def _wait_for_next_claim(self, digest: str) -> None:
        """Let the run that has made a result, and holds its claim, claim what its job makes next.

        But not for long: the holder may be any other run, which waits itself.
        """
        path = claim_path(self._context.workspace, digest)
        request, give_up_at = LockRequest(path), time.monotonic() + _SECONDS_TO_CLAIM_NEXT
        with suppress(OSError):  # another user's file, which this one may not write
            while is_locked(path, request) and time.monotonic() < give_up_at:
                result = read_result(self._context.workspace, digest)
                if result is None or self._is_forced():
                    return
                maker = f"run {result.run}" if result.run else "another run"
                self._wait(f"what {maker} makes next")

    def _note_changes(self, ingredients: Mapping[str, Any], digest: str) -> None:
        """Say why the stage does not continue what its last attempt has left, if it does not."""
        attempt = self._context.run.latest_attempt(self._stage.name)
        if attempt is None or attempt.read_result() is not None:
            return
        workspace = self._context.workspace
        if workspace.committed_steps(digest):
            return  # an earlier attempt with these ingredients is continued
        call = attempt.read_call() or {}
        if call.get("ingredients") and call["fingerprint"] not in ("", digest):
            origins, name = self._context.pipeline.origins, self._stage.name
            changes = differences(call["ingredients"], ingredients)
            found = [describe(one, name, origins) for one in islice(changes, _MOST_CHANGES)]
            why = "; ".join(found)
            self._log(f"starts over: since attempt {attempt.number} there are changes: {why}")

    def _reuse(self, digest: str) -> Finished | None:
        if self._is_forced():
            return None
        result = claim_for_stage(self._context, self._stage.name, digest)
        if result is None:
            return None
        self._log(f"reused: made by {result.run or 'an earlier run'} in {result.seconds:.1f} s")
        return Finished(result, None)

    def _submit(self, attempt: AttemptDirectory) -> Finished:
        # Imported here: what only plans or reads never pays for it.
        from redco_flow.launch.executor import make_chaining_executor, make_executor

        self._state_store.note("job_submitting", stage=self._stage.name, attempt=attempt.number)
        given = (self._context.profile_of(self._stage.name), self._context.environment)
        rest = write_rest(self._context, self._attempts, attempt)
        if rest:
            job = make_chaining_executor(*given).submit_call_after(attempt, (), then=rest)
        else:
            job = make_executor(*given).submit_call(attempt)
        if attempt.read_job() is None:
            write_json(attempt.job_path, job.record())
        if not job.is_unsubmitted:
            self._log(f"job {job.job_id} started; log: {job.paths.stdout}")
        note_rest(self._context, attempt, rest)
        return self._follow("job_submitted", attempt, job)

    def _follow(self, event: str, attempt: AttemptDirectory, job: CallJob) -> Finished:
        try:
            return self._follower.follow(event, attempt, job)
        except StageFailed:
            self._attempts.judged.add(attempt)
            raise

    def _hand_over(self) -> None:
        """Claim what the job makes next, and leave this stage's slot to that stage.

        To be called while this stage is claimed: another run's job would only wait for this one.
        """
        after = next_in_job(self._context, self._attempts, self._stage.name)
        if after is None or self._chain is not None:
            return
        self._attempts.claim(after)
        self._attempts.hand_over_slot(self._stage.name, after.stage)

    def _is_forced(self) -> bool:
        """Whether the stage must run although its result stands, and has not run since."""
        plan = self._context.plan.stages.get(self._stage.name)
        return plan is not None and plan.forced

    def _wait(self, for_what: str) -> None:
        if self._state_store.stage(self._stage.name).get("message") != f"waits for {for_what}":
            self._log(f"waits for {for_what}")
            self._state_store.set_stage(
                self._stage.name, State.WAITING, message=f"waits for {for_what}"
            )
        self._context.stop.wait(_POLL_SECONDS)
        self._context.stop.raise_if_set(self._stage.name)

    @contextmanager
    def _slot(self) -> Iterator[None]:
        """Hold one of the profile's `max_parallel_stages`."""
        while not self._context.slots.acquire(blocking=False):
            self._attempts.release_ended()
            self._wait("a free slot (max_parallel_stages)")
        self._attempts.have_slots.add(self._stage.name)
        try:
            yield
        finally:
            self._attempts.release(self._stage.name)

    def _old_result_set_aside(self, digest: str) -> AbstractContextManager[None]:
        if self._is_forced() or is_doubtful(self._context.workspace, digest):
            return result_set_aside(self._context.workspace, digest)
        return nullcontext()


def _write_known_inputs(attempt: AttemptDirectory) -> None:
    """Complete a call that was submitted ahead: who reads it later finds what the job found."""
    call = read_call(attempt.call_path)
    if call.upstream:
        write_call(attempt, with_inputs(call))
