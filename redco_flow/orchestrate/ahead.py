"""A run whose stages all stand in the cluster's queue at once, each behind those it takes from.

The cluster starts them in order, with or without a launcher. Here they are submitted, found
again by a later launcher, and submitted anew behind a stage that is tried again. Following them
is `ahead_runner`'s.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from redco_flow.errors import ClusterUnreachable, RedcoFlowError, StageFailed
from redco_flow.launch.call import Call, read_call
from redco_flow.launch.ending import unstarted_record
from redco_flow.orchestrate.calls import write_attempt, write_attempt_ahead
from redco_flow.orchestrate.ingredients import stage_ingredients
from redco_flow.orchestrate.planning import input_ids
from redco_flow.orchestrate.run_context import RunContext, Say
from redco_flow.records import write_json
from redco_flow.tracking.attempt import AttemptDirectory
from redco_flow.tracking.clock import utc_now
from redco_flow.tracking.fingerprint import fingerprint
from redco_flow.tracking.results import find_result


class AheadChain:
    """The jobs of one run's stages, one a stage at a time; its methods may be called by threads.

    Args:
        context: the run.
        upstream: of each stage of this session, in topological order, what it takes from.
    """

    def __init__(self, context: RunContext, upstream: Mapping[str, Sequence[str]]) -> None:
        self._context = context
        self._upstream = upstream
        self._mutex = threading.Lock()
        self._made: dict[str, Mapping[str, str]] = {}
        self._attempts: dict[str, AttemptDirectory] = {}
        self._problems: dict[str, Exception] = {}
        self._own: set[AttemptDirectory] = set()

    def submit(self, say: Say) -> None:
        """Submit every stage that has no result and no job yet; never raises for one of them.

        A stage that cannot be submitted keeps its error for `attempt_of`; those behind it stay
        out of the queue.
        """
        with self._mutex:
            for stage in self._upstream:
                with self._problem_kept(stage, say):
                    is_there = self._find_again(stage)
                    if not is_there and not self._context.stop.is_set and not self._reuse(stage):
                        self._submit(stage, say)

    def has_job(self, stage: str) -> bool:
        """Whether the stage has a job here, or an error instead of one; it is reused if not."""
        return stage in self._attempts or stage in self._problems

    def has_submitted(self, attempt: AttemptDirectory) -> bool:
        """Whether the attempt is of this session, not found again."""
        return attempt in self._own

    def attempt_of(self, stage: str) -> AttemptDirectory:
        """Return the stage's attempt.

        Raises:
            StageFailed: it could not be submitted; says why.
        """
        with self._mutex:
            problem = self._problems.get(stage)
        if problem is not None:
            raise StageFailed(f"stage '{stage}' could not be submitted: {problem}") from problem
        return self._attempts[stage]

    def submit_again(self, stage: str, say: Say) -> None:
        """Give a stage whose attempt failed a new one, and have all behind it wait for that."""
        with self._mutex:
            failed = self._attempts.pop(stage)
            self._end_behind(stage, f"upstream {stage} failed (attempt {failed.number})")
            for one in (stage, *self._behind(stage)):
                with self._problem_kept(one, say):
                    self._submit(one, say)

    def end_behind(self, stage: str, why: str) -> None:
        """Take the jobs that wait for `stage` out of the queue; their records say why."""
        with self._mutex:
            self._end_behind(stage, why)

    def end_all(self, why: str) -> None:
        """Take every job of a stage that has not completed out of the queue, whoever sent it."""
        states = self._context.book.stages()
        with self._mutex:
            for stage in self._upstream:
                attempt = self._context.run.latest_attempt(stage)
                if attempt is not None and states[stage]["state"] != "completed":
                    self._try_to_end(attempt, why)

    def _behind(self, stage: str) -> Iterator[str]:
        """The stages of this session that need `stage`, in topological order."""
        found = {stage}
        for name, upstream in self._upstream.items():
            if found.intersection(upstream):
                found.add(name)
                yield name

    def _find_again(self, stage: str) -> bool:
        """Take over what an earlier launcher of this run submitted, if it still holds."""
        attempt = self._context.run.latest_attempt(stage)
        if attempt is None or attempt.read_job() is None:
            return False
        if not self._takes_from_current(read_call(attempt.call_path)):
            self._end(attempt, "what it takes from is made anew")
            return False
        if not self._is_published(attempt) and attempt.read_exit() is not None:
            return False
        self._attempts[stage] = attempt
        return True

    def _is_published(self, attempt: AttemptDirectory) -> bool:
        """Whether the attempt has made its result; what it made is noted."""
        result = attempt.read_result()
        if result is None or not find_result(self._context.workspace, result["fingerprint"]):
            return False
        self._made[attempt.stage] = result["outputs"]
        return True

    def _takes_from_current(self, call: Call) -> bool:
        """Whether a call's inputs are those that this run has, or the attempts that make them."""
        for reference in (one for given in call.inputs.values() for one in given):
            made = self._made.get(reference.stage, {})
            attempt = self._attempts.get(reference.stage)
            if reference.id and made.get(reference.output) != reference.id:
                return False
            if not reference.id and call.upstream[reference.stage] != str(attempt and attempt.path):
                return False
        return True

    def _reuse(self, stage: str) -> bool:
        """Take a published result, where all inputs are known and it has one."""
        if any(one not in self._made for one in self._upstream[stage]):
            return False
        _, digest = self._ingredients(stage)
        result = find_result(self._context.workspace, digest)
        if result is not None:
            self._made[stage] = result.outputs
        return result is not None

    @contextmanager
    def _problem_kept(self, stage: str, say: Say) -> Iterator[None]:
        """Keep a stage's error for whoever asks for its attempt."""
        self._problems.pop(stage, None)
        try:
            yield
        except (RedcoFlowError, OSError) as error:
            self._problems[stage] = error
            say(f"{stage} | could not be submitted: {error}")

    def _submit(self, stage: str, say: Say) -> None:
        # Imported here: what only plans or reads never pays for it.
        from redco_flow.launch.executor import make_chaining_executor, reattach

        waits_for = self._open_attempts(stage)
        if waits_for is None:
            return
        attempt = self._write(stage, waits_for)
        book = self._context.book
        book.note("job_submitting", stage=stage, attempt=attempt.number)
        executor = make_chaining_executor(self._context.profile, self._context.environment)
        jobs = [reattach(one.read_job() or {}) for one in waits_for.values()]
        job = executor.submit_call_after(attempt, jobs)
        if attempt.read_job() is None:
            write_json(attempt.job_path, job.record())
        self._attempts[stage] = attempt
        self._own.add(attempt)
        waits = f" and waits for {', '.join(waits_for)}" if waits_for else ""
        text = f"job {job.job_id} is in the queue{waits}"
        fields = {"attempt": attempt.number, "job_id": job.job_id, "message": text}
        book.set_stage(stage, "waiting", event="job_submitted", **fields)
        say(f"{stage} | {text}")

    def _open_attempts(self, stage: str) -> dict[str, AttemptDirectory] | None:
        """The attempts that `stage` has to wait for; None where it would wait in vain."""
        found = {}
        for one in self._upstream[stage]:
            attempt = self._attempts.get(one)
            if one in self._made or (attempt is not None and self._is_published(attempt)):
                continue
            if attempt is None:
                return None
            found[one] = attempt
        return found

    def _write(self, stage: str, waits_for: Mapping[str, AttemptDirectory]) -> AttemptDirectory:
        resolved = self._context.pipeline.stages[stage]
        if waits_for:
            return write_attempt_ahead(self._context, resolved, self._made, waits_for)
        ingredients, digest = self._ingredients(stage)
        return write_attempt(self._context, resolved, self._made, ingredients, digest)

    def _ingredients(self, stage: str) -> tuple[dict[str, Any], str]:
        """What determines the result of a stage whose inputs are known, and its fingerprint."""
        resolved = self._context.pipeline.stages[stage]
        ids = input_ids(resolved, self._made)
        ingredients = stage_ingredients(resolved, ids, self._context.workspace)
        return ingredients, fingerprint(ingredients)

    def _end_behind(self, stage: str, why: str) -> None:
        for one in self._behind(stage):
            if (attempt := self._attempts.pop(one, None)) is not None:
                self._try_to_end(attempt, why)

    def _try_to_end(self, attempt: AttemptDirectory, why: str) -> None:
        try:
            self._end(attempt, why)
        except ClusterUnreachable as error:
            fields = {"stage": attempt.stage, "attempt": attempt.number, "message": str(error)}
            self._context.book.note("job_not_cancelled", **fields)

    def _end(self, attempt: AttemptDirectory, why: str) -> None:
        """End an attempt's job, if it has one; of one that never began, write the record here."""
        record = attempt.read_job()
        if record is None or attempt.read_exit() is not None:
            return
        from redco_flow.launch.executor import reattach

        job = reattach(record)
        job.cancel(check=False)
        if attempt.ranks_with_logs():
            job.wait()
        else:
            write_json(attempt.exit_path, unstarted_record(why, utc_now()))
