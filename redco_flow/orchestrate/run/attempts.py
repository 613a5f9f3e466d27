"""The attempts of a run: find them again, follow their jobs, judge their ends, allow retries.

Attempts that earlier launchers left are judged: which of them still hold. A job is followed to its
end, its ending written down, and another attempt allowed by the profile's budgets.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from redco_flow.errors import (
    ClusterUnreachable,
    RedcoFlowError,
    RunCancelled,
    StageFailed,
    StoppedEarly,
)
from redco_flow.launch import disk_reserve
from redco_flow.launch.call import Call, InputReference, UpstreamMissing, read_call, with_inputs
from redco_flow.launch.endings import never_began, write_exit
from redco_flow.orchestrate.run.attempt_files import LogTail, await_result
from redco_flow.orchestrate.run.cancel import Detached, Log, RunContext, StopRequest, pause_after
from redco_flow.orchestrate.run.ingredients import stage_ingredients
from redco_flow.orchestrate.run.plan import input_ids
from redco_flow.orchestrate.run.state import StateStore
from redco_flow.records import SECONDS_TO_SEE_RECORDS, explain_no_space, read_json_if_present
from redco_flow.tracking.attempt import AttemptDirectory, Cause, ExitRecord, State
from redco_flow.tracking.file_lock import HeldLock, LockRequest
from redco_flow.tracking.process_identity import utc_now
from redco_flow.tracking.results import (
    StageResult,
    claim_result,
    fingerprint,
    read_result,
)
from redco_flow.tracking.sweep_directory import current_attempt, find_early_stop
from redco_flow.tracking.typed_records import unless_damaged
from redco_flow.tracking.workspace import Workspace

if TYPE_CHECKING:
    from redco_flow.launch.executor import CallJob
    from redco_flow.launch.job import JobStatus


class StageAttempts:
    """Results and attempts by stage; a stage is looked for after those that it takes from.

    Args:
        context: the run.
        upstream: of each stage of this session, what it takes from.
        judges_ended: an attempt that failed unobserved holds until it has been judged, unless
            it had ended before the run was opened.
    """

    def __init__(
        self,
        context: RunContext,
        upstream: Mapping[str, Sequence[str]],
        *,
        judges_ended: bool,
    ) -> None:
        self.made: dict[str, Mapping[str, str]] = {}
        self.current: dict[str, AttemptDirectory] = {}
        self.judged: set[AttemptDirectory] = set()  # their jobs have ended without a result
        self.have_slots: set[str] = set()  # stages
        self.handed_over: set[str] = set()  # those that no thread follows yet
        self._claims: dict[str, HeldLock] = {}
        self._found_again: set[AttemptDirectory] = set()
        self._context = context
        self._upstream = upstream
        self._judges_ended = judges_ended

    def find_again(self, stage: str) -> AttemptDirectory | None:
        """Take over what an earlier launcher submitted for the stage, if it still holds.

        Returns:
            An attempt that does not hold and whose job is to be ended, if it has not.
        """
        # Imported here: what only plans or reads never pays for it.
        from redco_flow.launch.executor import reattach

        attempt = current_attempt(self._context.run, stage)
        record = attempt.read_job() if attempt is not None else None
        if attempt is None or record is None:
            return None
        if self.is_of_another_run(attempt):
            # Once it has ended, its result is reused like any other, or this run makes its own.
            if attempt.read_exit() is None:
                self.current[stage] = attempt
            return None
        if not self._takes_from_current(read_call(attempt.call_path)):
            return attempt
        _revoke_cancel(attempt)
        ended_before = self._context.state_store.stage(stage).get("ended_before", 0)
        is_judged = self._judges_ended and attempt.number > ended_before
        if not self.is_published(attempt) and reattach(record).done() and not is_judged:
            return attempt  # of a lost job, ending it ends what it left behind
        self.current[stage] = attempt
        self._found_again.add(attempt)
        return None

    def is_found_again(self, attempt: AttemptDirectory) -> bool:
        """Whether an earlier launcher submitted it."""
        return attempt in self._found_again

    def reuse(self, stage: str) -> bool:
        """Take a published result, where all inputs are known and it has one."""
        if any(one not in self.made for one in self._upstream[stage]):
            return False
        _, digest = self.ingredients(stage)
        result = claim_for_stage(self._context, stage, digest)
        if result is not None:
            self.made[stage] = result.outputs
        return result is not None

    def is_published(self, attempt: AttemptDirectory) -> bool:
        """Whether the attempt has published its result; its outputs are noted."""
        result = attempt.read_result()
        if result is None or not claim_result(self._context.workspace, result["fingerprint"]):
            return False
        self.made[attempt.stage] = result["outputs"]
        return True

    def is_of_another_run(self, attempt: AttemptDirectory) -> bool:
        """Whether the attempt belongs to another run, which ends and judges it."""
        return not attempt.path.is_relative_to(self._context.run.path)

    def open_upstream(self, stage: str) -> dict[str, AttemptDirectory] | None:
        """The attempts that `stage` has to wait for; None where it would wait in vain."""
        found = {}
        for one in self._upstream[stage]:
            attempt = self.current.get(one)
            if one in self.made or (attempt is not None and self.is_published(attempt)):
                continue
            if attempt is None:
                return None
            found[one] = attempt
        return found

    def claim(self, attempt: AttemptDirectory) -> None:
        """Claim what an attempt makes, so that other runs submit no job for it meanwhile.

        Without effect where another run has the claim.
        """
        if attempt.stage in self._claims:
            return
        with suppress(UpstreamMissing):
            digest = with_inputs(read_call(attempt.call_path)).fingerprint
            claim = request_claim(self._context.workspace, digest).try_once()
            if claim is not None:
                self._claims[attempt.stage] = claim

    def release(self, stage: str) -> None:
        """Give up the stage's claim and its slot."""
        if (claim := self._claims.pop(stage, None)) is not None:
            claim.release()
        with suppress(KeyError):
            self.have_slots.remove(stage)
            self._context.slots.release()

    def hand_over_slot(self, stage: str, to: str) -> None:
        """Leave a stage's slot to the stage that its job runs next."""
        if stage in self.have_slots:
            self.have_slots.remove(stage)
            self.have_slots.add(to)
            self.handed_over.add(to)

    def release_ended(self) -> None:
        """Free slots of stages that have ended in their jobs and that no flow may ever start."""
        for stage in tuple(self.handed_over):
            if self.current[stage].read_exit() is not None:
                self.handed_over.discard(stage)
                self.release(stage)

    def end_open(self, why: str) -> None:
        """End the jobs of stages that have not completed: the run ends, and nothing follows them.

        One that was asked to end before is left: it may never do so.
        """
        state_store = self._context.state_store
        for stage, attempt in tuple(self.current.items()):
            self.release(stage)
            is_left = attempt.cancel_path.exists() or attempt in self.judged
            if is_left or state_store.stage(stage)["state"] == State.COMPLETED:
                continue
            try:
                if not self.is_of_another_run(attempt):
                    end_attempt(attempt, why)
            except (RedcoFlowError, OSError) as error:  # the run ends all the same
                fields = {"attempt": attempt.number, "message": str(error)}
                state_store.note("job_not_cancelled", stage=stage, **fields)

    @property
    def stages(self) -> Collection[str]:
        """The stages of this session."""
        return self._upstream.keys()

    def forget_group(self, stage: str) -> None:
        """Forget the attempts of a stage and of its group, which could not be submitted."""
        group = self._context.pipeline.stages[stage].config.group
        for name, one in self._context.pipeline.stages.items():
            if name == stage or (group is not None and one.config.group == group):
                attempt = self.current.get(name)
                if attempt is not None and attempt.read_job() is None:
                    del self.current[name]

    def ingredients(self, stage: str) -> tuple[dict[str, Any], str]:
        """Return the ingredients and the fingerprint of a stage whose inputs are known."""
        resolved = self._context.pipeline.stages[stage]
        ids = input_ids(resolved, self.made)
        ingredients = stage_ingredients(resolved, ids, self._context.workspace)
        return ingredients, fingerprint(ingredients)

    def _takes_from_current(self, call: Call) -> bool:
        """Whether a call's inputs are this run's current ones, or the attempts that make them."""
        for reference in (one for given in call.inputs.values() for one in given):
            if reference.is_promoted:  # what it named is pinned for the whole run
                continue
            made = self.made.get(reference.stage, {}).get(reference.output)
            if reference.id and made != reference.id:
                return False
            if not reference.id and not self._comes_from_current(reference, call, made):
                return False
        return True

    def _comes_from_current(self, reference: InputReference, call: Call, made: str | None) -> bool:
        """Whether the attempt that a call waits for is the current one, or has made what is."""
        path = call.upstream[reference.stage]
        attempt = self.current.get(reference.stage)
        if attempt is not None and path == str(attempt.path):
            return True
        result = AttemptDirectory(Path(path)).read_result()
        return result is not None and result["outputs"].get(reference.output) == made


def _revoke_cancel(attempt: AttemptDirectory) -> None:
    """Forget a request to cancel that Slurm has taken for none of its jobs: they are to go on.

    Only those jobs' records say whether it was sent. Of other executors, parts of a job may have
    been asked to stop already.
    """
    if not attempt.cancel_path.exists() or attempt.read_exit() is not None:
        return
    paths = list(attempt.path.rglob(attempt.cancel_path.name))  # of arrays and their tasks, too
    sent = [(read_json_if_present(path) or {}).get("is_sent") for path in paths]
    if False in sent and True not in sent:
        for path in paths:
            path.unlink(missing_ok=True)


def claim_path(workspace: Workspace, fingerprint: str) -> Path:
    """Return the path of the launchers' lock of a fingerprint."""
    return workspace.work_directory(fingerprint).with_suffix(".claim")


def request_claim(workspace: Workspace, fingerprint: str) -> LockRequest:
    """Return the request for the launchers' lock of a fingerprint."""
    path = claim_path(workspace, fingerprint)
    path.parent.mkdir(parents=True, exist_ok=True)
    return LockRequest(path)


def end_attempt(attempt: AttemptDirectory, why: str) -> None:
    """End an attempt's job, if it has one; of one that never began, write the record here.

    Raises:
        ClusterUnreachable: its job could not be cancelled.
    """
    record = attempt.read_job()
    if record is None or attempt.read_exit() is not None:
        return
    from redco_flow.launch.executor import reattach

    job = reattach(record)
    job.cancel(check=False)
    if attempt.ranks_with_logs():
        job.wait()
    else:
        write_exit(attempt, never_began(why))


def claim_for_stage(context: RunContext, stage: str, fingerprint: str) -> StageResult | None:
    """Return the published result that a stage of the run reuses, if there is one.

    The run's records name the fingerprint before, so that `redco-flow gc` keeps the artifacts.
    """
    if read_result(context.workspace, fingerprint) is None:
        return None
    planned, state_store = context.plan.stages.get(stage), context.state_store
    known = (planned and planned.fingerprint, state_store.stage(stage).get("fingerprint"))
    if fingerprint not in known:
        fields = {"event": "result_found", "fingerprint": fingerprint}
        state_store.set_stage(stage, State.PENDING, **fields)
    return claim_result(context.workspace, fingerprint)


_POLL_SECONDS = 0.25
_EXTRA_SECONDS_TO_STOP = 60.0
_SECONDS_BETWEEN_CANCELS = 5.0


def follow_job(
    job: CallJob,
    stop: StopRequest,
    log: Log,
    job_log: Log,
    *,
    grace_seconds: float,
    on_news: Callable[[JobStatus], None],
) -> None:
    """Return when the job has ended with a result; `job_log` takes its log lines as they appear.

    A request to cancel is handed on to the job, which then has its grace to save.

    Args:
        on_news: called when there is news: it waits in a queue, and why; it runs, and where.

    Raises:
        StageFailed: it ended without a result; names job id, log and last lines.
        RunCancelled: it was cancelled, by the run's stop request or from outside redco-flow.
        StoppedEarly: its sweep stopped it.
        Detached: this process is to end; the job runs on.
    """
    tail = LogTail(job.paths.stdout)
    give_up_at: float | None = None
    told = ""
    since = time.monotonic()
    while True:
        # Before the log: what it printed before its end is then all there.
        status = job.status()
        finished = status.is_finished
        if status.news and status.news != told:
            told, since = status.news, time.monotonic()
            log(_words(job, told))
            on_news(status)
        for line in tail.last_lines() if finished else tail.new_lines():
            job_log(line)
        if finished:
            break
        if give_up_at is not None:
            _doze_until(job, give_up_at)
        elif stop.wait(pause_after(since)):
            if _stop(job, stop, log):
                give_up_at = time.monotonic() + grace_seconds + _EXTRA_SECONDS_TO_STOP
            else:
                job.wait_seconds(_SECONDS_BETWEEN_CANCELS)
    _raise_unless_completed(job, stop)


def _words(job: CallJob, said: str) -> str:
    return said if job.is_unsubmitted else f"job {job.job_id} {said}"


def _stop(job: CallJob, stop: StopRequest, log: Log) -> bool:
    """Cancel the job; return whether the cluster has taken the request."""
    if stop.kind == "detach":
        raise Detached(stop.reason)
    log(f"cancelling job {job.job_id}: {stop.reason}")
    try:
        job.cancel(check=False)
    except ClusterUnreachable as error:
        log(f"job {job.job_id} is not cancelled yet, trying again: {error}")
        return False
    return True


def _doze_until(job: CallJob, give_up_at: float) -> None:
    """Wait a moment for a cancelled job."""
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
    if (early := find_early_stop(job.attempt)) is not None:
        raise StoppedEarly(early.reason)
    raise RunCancelled(str(error))


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
    log: Log
    job_log: Log

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
        self.context.state_store.set_stage(self.stage, State.RUNNING, event=event, **fields)
        try:
            follow_job(
                job,
                self.context.stop,
                self.log,
                self.job_log,
                grace_seconds=self.context.profile_of(self.stage).grace_seconds,
                on_news=lambda status: self._set_news(job, status),
            )
        except StageFailed as failure:
            disk_reserve.free(attempt.path)
            self._raise_if_worth_a_retry(attempt, job, failure)
            raise
        disk_reserve.free(attempt.path)
        return Finished(self.await_result(attempt, job), attempt.number)

    def await_result(self, attempt: AttemptDirectory, job: CallJob) -> StageResult:
        """Return the result of a completed job; wait for its records where they may be late.

        Raises:
            StageFailed: they have not appeared; names the directory and how long was waited.
            RunCancelled, Detached: the run was stopped meanwhile.
        """
        state_store, reported = self.context.state_store, set[str]()

        def while_waiting(text: str, seconds: float) -> None:
            if text not in reported:
                reported.add(text)
                text = f"job {job.job_id} has completed; waits for {text}"
                self.log(text)
                state_store.set_stage(self.stage, State.RUNNING, event="job_news", message=text)
            self.context.stop.wait(seconds)
            self.context.stop.raise_if_set(self.stage)

        return await_result(
            self.context.workspace,
            attempt,
            seconds=SECONDS_TO_SEE_RECORDS if job.records_may_be_late else 0.0,
            while_waiting=while_waiting,
        )

    def result_of(self, attempt: AttemptDirectory) -> Finished | None:
        """Return the published result of an attempt, if it has one that can be trusted."""
        record = attempt.read_result()
        if record is None:
            return None
        result = claim_result(self.context.workspace, record["fingerprint"])
        return Finished(result, attempt.number) if result is not None else None

    def _set_news(self, job: CallJob, status: JobStatus) -> None:
        """Set the stage's state and message; a queued job is pending, not running."""
        is_waiting = status.state is State.PENDING
        message = _words(job, status.message) if is_waiting else ""
        fields = {"message": message, "told_at": utc_now(), "job_id": job.job_id}
        self.context.state_store.set_stage(self.stage, State.RUNNING, event="job_news", **fields)

    def _raise_if_worth_a_retry(
        self, attempt: AttemptDirectory, job: CallJob, failure: StageFailed
    ) -> None:
        """Raise RetryableFailure if the profile's budget for this ending is not used up.

        The budget is counted from the attempts' own records, so that it outlives this process.
        """
        cause = attempt.cause or Cause.LOST  # it left no record of its end
        if attempt.cause is None and self.context.profile_of(self.stage).retries.lost:
            _record_loss(attempt, job)
        # This one counts too where it left no record.
        num_ended = count_ended(self.context.run.attempts(self.stage), cause)
        num_ended += attempt.cause is None
        if not self.context.profile_of(self.stage).retries.allows(cause, num_ended):
            return
        self.context.state_store.note(
            "job_retried", stage=self.stage, attempt=attempt.number, cause=cause
        )
        self.log(f"attempt {attempt.number} ended: {cause}; trying again (retries in the profile)")
        raise RetryableFailure(str(failure)) from failure


def count_ended(attempts: Iterable[AttemptDirectory], cause: Cause) -> int:
    """Return how many attempts ended by a cause, as the retries of a profile count them.

    A timeout counts where the stage was the first of its job. After another stage of its group, or
    in a packed job, it had only the rest of the job's time; its next attempt is the first of a job.
    """
    ended = [one for one in attempts if one.cause is cause]
    return len(ended) if cause is not Cause.TIMEOUT else sum(map(_is_first_of_job, ended))


def _is_first_of_job(attempt: AttemptDirectory) -> bool:
    record = unless_damaged(attempt.read_job) or {}
    group = record.get("group")
    is_first = not group or AttemptDirectory(Path(group[0])).stage == attempt.stage
    return is_first and "pack" not in record


def _record_loss(attempt: AttemptDirectory, job: CallJob) -> None:
    """End what is left of a lost job, and record that it is lost; one that lives by now stays."""
    status = job.status()
    if status.cause is not None:
        with suppress(ClusterUnreachable):  # what is left of it ends, or holds the work lock
            job.cancel(check=False)
        write_exit(attempt, ExitRecord(exit_code=None, cause=Cause.LOST, message=status.message))


@contextmanager
def failures_recorded(state_store: StateStore, stage: str) -> Iterator[None]:
    """Write into the run's state how bringing the stage to its end went wrong, if it does.

    Raises:
        StageFailed: for whatever it was (a full disk, a deleted input): the run must go on.
        RunCancelled: as it came.
    """
    try:
        yield
    except RunCancelled as error:
        is_early = isinstance(error, StoppedEarly)
        state = State.STOPPED_EARLY if is_early else State.CANCELLED
        state_store.set_stage(stage, state, message=str(error))
        raise
    except (Exception, SystemExit) as error:  # code of the user's may call sys.exit
        failure = _as_failure(stage, error)
        state_store.set_stage(stage, State.FAILED, message=str(failure))
        raise failure from error


def record_completed(
    state_store: StateStore, stage: str, finished: Finished, said: str = ""
) -> None:
    """Write into the run's state what the stage made, or whose result it reuses.

    Args:
        said: what came of what the launcher did with the result.
    """
    result = finished.result
    maker = f"made by {result.run}" if finished.reused and result.run else ""
    made_by = {"run": result.run, "stage": result.stage, "attempt": result.attempt}
    state_store.set_stage(
        stage,
        State.COMPLETED,
        reused=finished.reused,
        attempt=finished.attempt,
        seconds=0.0 if finished.reused else result.seconds,
        artifacts=dict(result.outputs),
        metrics=result.metrics,
        fingerprint=result.fingerprint,
        made_by=made_by if finished.reused and result.run else None,
        message="; ".join(filter(None, [maker, said])),
    )


def _as_failure(stage: str, error: BaseException) -> StageFailed:
    if isinstance(error, StageFailed):
        return error
    said = str(error) if isinstance(error, RedcoFlowError) else f"{type(error).__name__}: {error}"
    if isinstance(error, OSError) and (advice := explain_no_space(error)):
        said = f"{said}. {advice}"
    return StageFailed(f"stage '{stage}': {said}")
