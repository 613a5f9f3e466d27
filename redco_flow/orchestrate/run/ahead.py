"""Submit all stages of a run at once, as jobs that depend on their upstream stages' jobs.

The cluster starts them in order, with or without a launcher. Here they are submitted, found
again by a later launcher, and resubmitted downstream of a stage that is retried. A stage
whose result another run of the same sweep makes depends on that run's job and has none of its own.
Following them is `stage_runner`'s, and so is submitting what does not get into the queue at once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from redco_flow.errors import ClusterUnreachable, RedcoFlowError, StageFailed
from redco_flow.launch.call import read_call
from redco_flow.orchestrate.run.attempts import StageAttempts, end_attempt
from redco_flow.orchestrate.run.calls import write_attempt, write_attempt_ahead
from redco_flow.orchestrate.run.cancel import Log, RunContext
from redco_flow.orchestrate.run.groups import note_rest, write_rest
from redco_flow.records import write_json
from redco_flow.tracking.attempt import AttemptDirectory, Cause, State
from redco_flow.tracking.sweep_directory import note_shared_attempt

if TYPE_CHECKING:
    from redco_flow.launch.executor import CallJob


_POLL_SECONDS = 0.25
_SECONDS_FOR_ROOM = 35.0


def has_failed(attempt: AttemptDirectory) -> bool:
    """Whether the attempt's job has ended without a result."""
    return attempt.cause not in (None, Cause.COMPLETED)


@dataclass(frozen=True)
class SweepQueue:
    """Jobs of a sweep in the queue when a point is submitted.

    Args:
        keys: of the run's stages; what has one key makes one result.
        makers: by key, the attempts that make what earlier points need; this run's are added.
        after_end: jobs that must have ended before the run's first job begins.
        packed: stages of the run that one job runs with those of other points.
        pack: gets their attempts, which the caller submits.
    """

    keys: Mapping[str, str]
    makers: dict[str, AttemptDirectory]
    after_end: Sequence[CallJob] = ()
    packed: Collection[str] = ()
    pack: list[AttemptDirectory] = field(default_factory=list)

    def maker_of(self, stage: str) -> AttemptDirectory | None:
        """Return the attempt that makes the stage's result, if one in the queue does."""
        attempt = self.makers.get(self.keys[stage])
        return attempt if attempt is not None and not has_failed(attempt) else None

    def note(self, stage: str, attempt: AttemptDirectory) -> None:
        """Have points that come later wait for this attempt."""
        if self.maker_of(stage) is None:
            self.makers[self.keys[stage]] = attempt


class JobChain:
    """The jobs of one run's stages, one a stage at a time; thread-safe.

    Args:
        context: the run.
        attempts: what it has.
        upstream: of each stage of this session, in topological order, what it takes from.
    """

    def __init__(
        self,
        context: RunContext,
        attempts: StageAttempts,
        upstream: Mapping[str, Sequence[str]],
    ) -> None:
        self._context = context
        self._known = attempts
        self._upstream = upstream
        self._mutex = threading.Lock()
        self._problems: dict[str, Exception] = {}
        self._jobs: dict[AttemptDirectory, CallJob] = {}

    def submit(self, log: Log, queue: SweepQueue | None = None) -> None:
        """Submit every stage that has no result and no job yet; never raises for one of them.

        A stage that cannot be submitted keeps its error for `attempt_of`; those downstream
        stay out of the queue.

        Args:
            queue: of a run that is submitted with others of its sweep.
        """
        with self._mutex:
            for stage in self._upstream:
                with self._problem_kept(stage, log):
                    self._find_or_submit(stage, log, queue)

    def attempt_of(self, stage: str) -> AttemptDirectory | None:
        """Return the stage's attempt; None where it has a result instead.

        Raises:
            StageFailed: it could not be submitted; says why.
        """
        with self._mutex:
            problem = self._problems.get(stage)
        if problem is not None:
            raise StageFailed(f"stage '{stage}' could not be submitted: {problem}") from problem
        return self._known.current.get(stage)

    def job_of(self, attempt: AttemptDirectory) -> CallJob:
        """Return an attempt's job; one that waits to be submitted only this process can submit."""
        from redco_flow.launch.executor import reattach

        with self._mutex:
            return self._jobs.get(attempt) or reattach(attempt.read_job() or {})

    @property
    def is_cut(self) -> bool:
        """Whether the cluster takes no more jobs for now; the rest wait for their upstream."""
        with self._mutex:
            return self._has_unsubmitted()

    def _has_unsubmitted(self) -> bool:
        return any(job.is_unsubmitted for job in self._jobs.values())

    def submit_again(self, stage: str, log: Log) -> AttemptDirectory | None:
        """Give a stage whose attempt failed a new one, and have all downstream stages wait for it.

        Raises:
            StageFailed: it could not be submitted; says why.
        """
        with self._mutex:
            failed = self._known.current.pop(stage)
            self._end_downstream(stage, f"upstream {stage} failed (attempt {failed.number})")
            for one in (stage, *self._downstream(stage)):
                with self._problem_kept(one, log):
                    self._submit(one, log)
        return self.attempt_of(stage)

    def end_downstream(self, stage: str, why: str) -> None:
        """Take the jobs that wait for `stage` out of the queue; their records say why."""
        with self._mutex:
            self._end_downstream(stage, why)

    def end_all(self, why: str) -> None:
        """Take every job of a stage that has not completed out of the queue."""
        states = self._context.state_store.stages()
        with self._mutex:
            for stage in self._upstream:
                attempt = self._context.run.latest_attempt(stage)
                if attempt is not None and states[stage]["state"] != State.COMPLETED:
                    self._try_to_end(attempt, why)

    def _find_or_submit(self, stage: str, log: Log, queue: SweepQueue | None) -> None:
        if stage in self._known.current:
            return  # the job of its group has it
        is_grouped = self._context.pipeline.stages[stage].config.group is not None
        if not self._take_up(stage) and not self._context.stop.is_set:
            maker = queue.maker_of(stage) if queue is not None and not is_grouped else None
            if maker is not None:
                self._share(stage, maker)
            elif queue is not None and stage in queue.packed:
                self._pack(stage, queue.pack, log)
            else:
                self._submit(stage, log, queue.after_end if queue is not None else ())
        attempt = self._known.current.get(stage)
        is_open = attempt is not None and not self._known.is_published(attempt)
        if queue is not None and attempt is not None and is_open and not is_grouped:
            queue.note(stage, attempt)

    def _take_up(self, stage: str) -> bool:
        """Find the stage's job again, or its result; whether nothing is to be submitted for it."""
        outdated = self._known.find_again(stage)
        if outdated is not None:
            self._end(outdated, "its inputs are computed again")
        return stage in self._known.current or self._known.reuse(stage)

    def _share(self, stage: str, attempt: AttemptDirectory) -> None:
        """Have the stage wait for another run's attempt, which makes the same."""
        note_shared_attempt(self._context.run, stage, attempt)
        self._known.current[stage] = attempt
        text = f"made by run {read_call(attempt.call_path).run}"
        self._context.state_store.set_stage(stage, State.WAITING, event="job_shared", message=text)

    @contextmanager
    def _problem_kept(self, stage: str, log: Log) -> Iterator[None]:
        """Keep a stage's error until its attempt is asked for."""
        self._problems.pop(stage, None)
        try:
            yield
        except (RedcoFlowError, OSError) as error:
            self._problems[stage] = error
            log(f"{stage} | could not be submitted: {error}")

    def _downstream(self, stage: str) -> Iterator[str]:
        """The stages of this session that need `stage`, in topological order."""
        found = {stage}
        for name, upstream in self._upstream.items():
            if found.intersection(upstream):
                found.add(name)
                yield name

    def _submit(self, stage: str, log: Log, after_end: Sequence[CallJob] = ()) -> None:
        # Imported here: what only plans or reads never pays for it.
        from redco_flow.launch.executor import make_chaining_executor, reattach

        if stage in self._known.current:
            return  # the job of its group has it
        if self._has_unsubmitted():
            log(f"{stage} | is submitted when its upstream stages have completed")
            return
        waits_for = self._known.open_upstream(stage)
        if waits_for is None:
            return
        upstream = [reattach(one.read_job() or {}) for one in waits_for.values()]
        if any(one.is_unsubmitted for one in upstream):  # an earlier launcher left it so
            log(f"{stage} | is submitted when its upstream stages have completed")
            return
        attempt = self._write(stage, waits_for)
        self._context.state_store.note("job_submitting", stage=stage, attempt=attempt.number)
        profile = self._context.profile_of(stage)
        executor = make_chaining_executor(profile, self._context.environment)
        is_first = all(map(self._known.is_of_another_run, waits_for.values()))
        try:
            rest = write_rest(self._context, self._known, attempt)
            job = executor.submit_call_after(attempt, upstream, after_end if is_first else (), rest)
        except (RedcoFlowError, OSError):
            self._known.forget_group(stage)
            raise
        if attempt.read_job() is None:
            write_json(attempt.job_path, job.record())
        self._jobs[attempt] = job
        self._wait_for_room(stage, job, log)
        if attempt.cause is Cause.NEVER_SUBMITTED:
            raise StageFailed(job.status().message)
        note_rest(self._context, attempt, rest)
        if job.is_unsubmitted:
            return
        names = ", ".join(waits_for)
        text = f"job {job.job_id} is in the queue{f' and waits for {names}' if names else ''}"
        fields = {"attempt": attempt.number, "job_id": job.job_id, "message": text}
        self._context.state_store.set_stage(stage, State.WAITING, event="job_submitted", **fields)
        log(f"{stage} | {text}")

    def _pack(self, stage: str, pack: list[AttemptDirectory], log: Log) -> None:
        """Write the stage's attempt, for a job that is submitted when its pack is complete."""
        if self._has_unsubmitted():
            log(f"{stage} | is submitted when its upstream stages have completed")
            return
        waits_for = self._known.open_upstream(stage)
        if waits_for is not None:
            pack.append(self._write(stage, waits_for))
            self._known.current[stage] = pack[-1]

    def note_packed(self, job: CallJob) -> None:
        """Write into the run's state that a packed job is to run its attempts."""
        for stage, attempt in self._known.current.items():
            is_own = not self._known.is_of_another_run(attempt)
            if not is_own or (attempt.read_job() or {}).get("pack") != str(job.paths.folder):
                continue
            text = f"job {job.job_id} runs it in its turn"
            if job.is_unsubmitted:
                text = job.status().message
            fields = {"attempt": attempt.number, "message": text}
            self._context.state_store.set_stage(
                stage, State.WAITING, event="job_submitted", **fields
            )

    def _wait_for_room(self, stage: str, job: CallJob, log: Log) -> None:
        """Wait for a job that the cluster refuses for now, but not long: others can be followed."""
        give_up_at = time.monotonic() + _SECONDS_FOR_ROOM
        said = ""
        while job.is_unsubmitted and not job.done() and time.monotonic() < give_up_at:
            if (text := job.status().message) != said:
                said = text
                self._context.state_store.set_stage(stage, State.WAITING, message=text)
                log(f"{stage} | {text}")
            if self._context.stop.wait(_POLL_SECONDS) or self._context.run.cancel_requested():
                return

    def _write(self, stage: str, waits_for: Mapping[str, AttemptDirectory]) -> AttemptDirectory:
        resolved = self._context.pipeline.stages[stage]
        if waits_for:
            return write_attempt_ahead(self._context, resolved, self._known.made, waits_for)
        ingredients, digest = self._known.ingredients(stage)
        return write_attempt(self._context, resolved, self._known.made, ingredients, digest)

    def _end_downstream(self, stage: str, why: str) -> None:
        for one in self._downstream(stage):
            if (attempt := self._known.current.pop(one, None)) is not None:
                self._try_to_end(attempt, why)

    def _try_to_end(self, attempt: AttemptDirectory, why: str) -> None:
        try:
            self._end(attempt, why)
        except ClusterUnreachable as error:
            fields = {"stage": attempt.stage, "attempt": attempt.number, "message": str(error)}
            self._context.state_store.note("job_not_cancelled", **fields)

    def _end(self, attempt: AttemptDirectory, why: str) -> None:
        """As `end_attempt`; what belongs to another run stays."""
        if not self._known.is_of_another_run(attempt):
            self._jobs.pop(attempt, None)
            end_attempt(attempt, why)
