"""Bring the jobs of all points of a sweep into the cluster's queue, before any point has a driver.

Stage by stage: what several points would make alike is submitted once, by the first of them, and
the others wait for it; what asks for the same resources and waits alike is one array. A point's
jobs are those of a run ahead in every other respect, and are found again as such: submitting twice
submits nothing twice.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from redco_flow.errors import RedcoFlowError, UsageError
from redco_flow.launch.call import read_call
from redco_flow.launch.call_groups import CallGroup, QueuedCall, group_calls
from redco_flow.launch.ending import unstarted_record
from redco_flow.launch.executor import (
    CallJob,
    ChainingExecutor,
    make_chaining_executor,
    reattach,
)
from redco_flow.launch.job import NEVER_SUBMITTED
from redco_flow.orchestrate.ahead import Prepared
from redco_flow.orchestrate.driving import open_session
from redco_flow.orchestrate.ingredients import Sources
from redco_flow.orchestrate.run_context import Say
from redco_flow.orchestrate.session import RunSession
from redco_flow.orchestrate.state_book import StateBook, note_takeover
from redco_flow.orchestrate.stopping import StopRequest
from redco_flow.orchestrate.sweep_work import by_profile, work_keys
from redco_flow.records import write_json
from redco_flow.tracking.attempt import AttemptDirectory
from redco_flow.tracking.clock import utc_now
from redco_flow.tracking.lease import acquire
from redco_flow.tracking.run_directory import RunDirectory
from redco_flow.tracking.sweep_directory import SweepDirectory

_POLL_SECONDS = 0.2


@dataclass(frozen=True)
class QueuedPoint:
    """One point of a sweep, whose run's lease is held here.

    Args:
        number: its place in the sweep.
        keys: by stage; `sweep_work.work_keys`.
    """

    number: int
    session: RunSession
    keys: Mapping[str, str]


@dataclass
class SweepSubmission:
    """One pass over the stages of a sweep's points.

    Args:
        points: ascending.
        say: takes lines for people.
    """

    sweep: SweepDirectory
    points: Sequence[QueuedPoint]
    say: Say
    _makers: dict[str, AttemptDirectory] = field(default_factory=dict)

    def submit(self) -> None:
        """Submit what has neither result nor job; stop early where the sweep is cancelled.

        What cannot be submitted has its error in the log, and is tried again, alone, by the driver
        of its point.
        """
        self._settle_lost_ids()
        for stage in dict.fromkeys(name for point in self.points for name in point.keys):
            if self._is_cancelled:
                return
            self._submit_stage(stage)

    @property
    def _is_cancelled(self) -> bool:
        return self.sweep.cancel_path.exists()

    def _submit_stage(self, stage: str) -> None:
        fresh: dict[str, QueuedPoint] = {}
        sharing: list[QueuedPoint] = []
        for point in self.points:
            if stage not in point.session.upstream:
                continue
            chain, key = point.session.chain, point.keys[stage]
            with chain.problem_kept(stage, self._say_of(point)):
                if chain.take_up(stage):
                    if (attempt := chain.open_attempt_of(stage)) is not None:
                        self._makers.setdefault(key, attempt)
                elif key in self._makers or key in fresh:
                    sharing.append(point)
                else:
                    fresh[key] = point
        self._submit_fresh(stage, list(fresh.values()))
        for point in sharing:
            if (maker := self._makers.get(point.keys[stage])) is not None:
                point.session.chain.share(stage, maker)

    def _submit_fresh(self, stage: str, points: Sequence[QueuedPoint]) -> None:
        """Submit a stage of points that need it for themselves."""
        profiles = {point.number: point.session.context.profile for point in points}
        for profile, numbers in by_profile(profiles):
            members = [point for point in points if point.number in numbers]
            with self._problems_kept(stage, members):
                environment = members[0].session.context.environment
                executor = make_chaining_executor(profile, environment)
                self._submit_alike(stage, members, executor)

    def _submit_alike(
        self, stage: str, points: Sequence[QueuedPoint], executor: ChainingExecutor
    ) -> None:
        """Submit a stage of points that have one profile."""
        by_number = {point.number: point for point in points}
        prepared: dict[int, Prepared] = {}
        calls: list[QueuedCall] = []
        for point in points:
            with self._problems_kept(stage, [point]):
                if (ready := point.session.chain.prepare(stage)) is None:
                    continue
                upstream = executor.wait_for_ids(_jobs_of(ready))
                resources = read_call(ready.attempt.call_path).resources
                calls.append(QueuedCall(point.number, resources, upstream))
                prepared[point.number] = ready
        size = executor.max_array_size() if len(calls) > 1 else 1
        for group in group_calls(calls, max_array_size=size):
            members = [by_number[number] for number in group.numbers]
            ready_ones = [prepared[number] for number in group.numbers]
            with self._problems_kept(stage, members):
                jobs = self._submit_group(stage, group, ready_ones, executor)
                for point, ready, job in zip(members, ready_ones, jobs, strict=True):
                    point.session.chain.note_submitted(ready, job, self._say_of(point))
                    self._makers[point.keys[stage]] = ready.attempt

    def _submit_group(
        self,
        stage: str,
        group: CallGroup,
        prepared: Sequence[Prepared],
        executor: ChainingExecutor,
    ) -> list[CallJob]:
        if not group.is_array:
            return [executor.submit_call_after(prepared[0].attempt, _jobs_of(prepared[0]))]
        return executor.submit_group(
            group,
            [one.attempt for one in prepared],
            self._new_folder(stage),
            f"{self.sweep.id} {stage}",
            at_once=self.sweep.record["max_parallel"],
        )

    def _new_folder(self, stage: str) -> Path:
        """Where the next array of a stage is to stand."""
        folder = self.sweep.path / "arrays"
        number = sum(1 for _ in folder.glob(f"{stage}.*")) + 1
        return folder / f"{stage}.{number}"

    @contextmanager
    def _problems_kept(self, stage: str, points: Sequence[QueuedPoint]) -> Iterator[None]:
        """Have each of the points keep an error for whoever asks for the stage's attempt."""
        try:
            yield
        except (RedcoFlowError, OSError) as error:
            for point in points:
                point.session.chain.keep_problem(stage, error, self._say_of(point))

    def _say_of(self, point: QueuedPoint) -> Say:
        """Lines that begin with the point's run."""
        return lambda line: self.say(f"{point.session.context.run.id}: {line}")

    def _settle_lost_ids(self) -> None:
        """Have jobs whose ids were lost found by their names, all at once.

        Of an attempt that the cluster never got, its record says so: it is submitted anew.
        """
        attempts = [attempt for point in self.points for attempt in _attempts_of(point)]
        lost = [
            reattach(record)
            for attempt in attempts
            if (record := attempt.read_job()) and not record["job_id"] and not attempt.read_exit()
        ]
        while lost and not self._is_cancelled:
            for job in [one for one in lost if one.status().cause == NEVER_SUBMITTED]:
                why = "the cluster never got it"
                write_json(job.attempt.exit_path, unstarted_record(why, utc_now()))
            lost = [one for one in lost if not one.record()["job_id"] and not one.done()]
            time.sleep(_POLL_SECONDS)


def submit_points(sweep: SweepDirectory, runs: Sequence[RunDirectory], say: Say) -> None:
    """Bring the jobs of a sweep's runs into the queue, under the runs' leases; runs that somebody
    drives are left to him.
    """
    numbers = {run.id: number for number, run in enumerate(sweep.runs)}
    sources = Sources()
    with ExitStack() as leases:
        points = []
        for run in runs:
            try:
                lease = leases.enter_context(acquire(run))
            except UsageError as error:
                say(str(error))
                continue
            note_takeover(run, lease)
            try:
                points.append(_open_point(numbers[run.id], run, sources))
            except RedcoFlowError as error:  # its driver will say so in the run's own records
                say(f"{run.id}: {error}")
        SweepSubmission(sweep, points, say).submit()


def _open_point(number: int, run: RunDirectory, sources: Sources) -> QueuedPoint:
    session = open_session(run, StateBook(run), StopRequest(), leave_cancelled=False)
    context = session.context
    keys = work_keys(context.pipeline, context.workspace, sources)
    return QueuedPoint(number, session, keys)


def _jobs_of(prepared: Prepared) -> list[CallJob]:
    """The jobs that an attempt waits for."""
    return [reattach(one.read_job() or {}) for one in prepared.waits_for.values()]


def _attempts_of(point: QueuedPoint) -> Iterator[AttemptDirectory]:
    run = point.session.context.run
    for stage in point.session.upstream:
        if (attempt := run.latest_attempt(stage)) is not None:
            yield attempt
