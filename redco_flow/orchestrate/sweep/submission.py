"""Submit the jobs of a sweep's points ahead: each point as jobs of its own that wait for others."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from redco_flow.errors import RedcoFlowError, UsageError
from redco_flow.launch.endings import never_submitted, write_exit
from redco_flow.launch.executor import CallJob, reattach
from redco_flow.orchestrate.run.ahead import SweepQueue
from redco_flow.orchestrate.run.cancel import Log, StopRequest
from redco_flow.orchestrate.run.driver import Driver, open_session
from redco_flow.orchestrate.run.ingredients import Sources
from redco_flow.orchestrate.run.session import RunSession
from redco_flow.orchestrate.run.state import StateStore, note_takeover
from redco_flow.orchestrate.sweep.planned_jobs import work_keys
from redco_flow.tracking.attempt import AttemptDirectory, Cause, State
from redco_flow.tracking.locks import acquire
from redco_flow.tracking.run_directory import RunDirectory
from redco_flow.tracking.sweep_directory import SweepDirectory, current_attempt

_POLL_SECONDS = 0.5


class PointJobs:
    """The jobs that one point's run depends on.

    Args:
        run: its jobs are in the queue, as far as they could be submitted.
    """

    def __init__(self, run: RunDirectory) -> None:
        self._own: list[CallJob] = []
        self._shared: list[CallJob] = []
        for stage in run.read_state()["stages"]:
            attempt = current_attempt(run, stage)
            if attempt is not None and (record := attempt.read_job()):
                is_own = attempt.path.is_relative_to(run.path)
                (self._own if is_own else self._shared).append(reattach(record))

    @property
    def pack(self) -> str | None:
        """The packed job that runs the point's stages, by its directory; None where none does."""
        return next((one.record()["pack"] for one in self._own if "pack" in one.record()), None)

    @property
    def turn(self) -> int:
        """The place of the point's first stage in its packed job; 0 where it has none."""
        return min((one.record().get("turn", 0) for one in self._own), default=0)

    @property
    def are_left_over(self) -> bool:
        """Whether the point's packed job has ended before its turn, so it needs another one."""
        packed = {one.status().cause for one in self._own if "pack" in one.record()}
        others = {one.status().cause for one in self._own if "pack" not in one.record()}
        return packed == {Cause.NEVER_SUBMITTED} and others <= {None, Cause.COMPLETED}

    def need_orchestrator(self) -> bool:
        """Whether a job of the point's own has begun; of a point without, all others' have ended.

        Or whether one of its jobs is not submitted whole: the orchestrator submits the rest.

        A point that has no job at all needs one now: it can reuse everything, or tell why it has
        none.
        """
        if self._own:
            return any(
                job.is_unsubmitted or job.status().state is not State.PENDING for job in self._own
            )
        return all(job.done() for job in self._shared)


@dataclass(frozen=True)
class HeldPoint:
    """One point of a sweep, whose run's lease is held here.

    Args:
        keys: by stage, as `work_keys` returns them.
    """

    session: RunSession
    keys: Mapping[str, str]

    @property
    def run(self) -> RunDirectory:
        """The point's run."""
        return self.session.context.run

    def log_to(self, log: Log) -> Log:
        """Return a log that names the run in each line."""
        return lambda line: log(f"{self.run.id}: {line}")

    def open_jobs(self) -> list[CallJob]:
        """The jobs of the run's own stages that have left no record of their end."""
        return [
            reattach(record)
            for attempt in self._attempts()
            if (record := attempt.read_job()) and attempt.read_exit() is None
        ]

    def is_queued(self) -> bool:
        """Whether it has jobs, none of which has failed."""
        causes = {attempt.cause for attempt in self._attempts()}
        return None in causes and causes <= {None, Cause.COMPLETED}

    def _attempts(self) -> list[AttemptDirectory]:
        found = map(self.run.latest_attempt, self.session.upstream)
        return [attempt for attempt in found if attempt is not None]


def submit_points(
    sweep: SweepDirectory, runs: Sequence[RunDirectory], log: Log, driver: Driver
) -> None:
    """Submit the jobs of a sweep's runs, under the runs' leases.

    Runs that have an orchestrator are left to it. What cannot be submitted has its error in the
    log, and is tried again, alone, by the orchestrator of its run.

    Args:
        driver: a signal to it ends the submission early; what is submitted by then stays.
    """
    with ExitStack() as leases:
        points = list(take_runs(runs, leases, Sources(), log))
        resolve_lost_ids(sweep, points, driver)
        _submit_in_order(sweep, points, log, driver)


def take_runs(
    runs: Sequence[RunDirectory], leases: ExitStack, sources: Sources, log: Log
) -> Iterator[HeldPoint]:
    """Take the leases of runs and open them; those that cannot be are in the log.

    Args:
        leases: gets what releases them.
    """
    for run in runs:
        try:
            note_takeover(run, leases.enter_context(acquire(run)))
        except UsageError as error:
            log(str(error))
            continue
        try:
            yield _open_point(run, sources)
        except RedcoFlowError as error:  # its orchestrator records it in the run
            log(f"{run.id}: {error}")


def _submit_in_order(
    sweep: SweepDirectory, points: Sequence[HeldPoint], log: Log, driver: Driver
) -> None:
    """Submit one point after the other; stop early where the sweep is cancelled."""
    num_at_once = sweep.record["max_parallel"]
    before: deque[list[CallJob]] = deque([[]] * num_at_once, maxlen=num_at_once)
    makers: dict[str, AttemptDirectory] = {}
    # Points that are in the queue come first: one that is tried again waits for them.
    for point in sorted(points, key=lambda one: not one.is_queued()):
        if sweep.cancel_path.exists() or driver.is_stopped:
            return
        queue = SweepQueue(point.keys, makers, before[0])
        point.session.submit_ahead(point.log_to(log), queue)
        if point.session.is_cut:
            log("the cluster takes no more jobs for now: the other points start as points end")
            return
        if jobs := point.open_jobs():
            before.append(jobs)


def _open_point(run: RunDirectory, sources: Sources) -> HeldPoint:
    session = open_session(run, StateStore(run), StopRequest(), leave_cancelled=False)
    context = session.context
    return HeldPoint(session, work_keys(context.pipeline, context.workspace, sources))


def resolve_lost_ids(sweep: SweepDirectory, points: Iterable[HeldPoint], driver: Driver) -> None:
    """Find jobs whose ids were lost by their names, all at once.

    An attempt that the cluster never got is recorded so, and is submitted again.
    """
    lost = [
        job
        for point in points
        for job in point.open_jobs()
        if not job.record()["job_id"] and not job.is_unsubmitted  # its run submits the rest
    ]
    while lost and not sweep.cancel_path.exists() and not driver.is_stopped:
        for job in lost:
            if (status := job.status()).cause is Cause.NEVER_SUBMITTED:
                write_exit(job.attempt, never_submitted(status.message))
        lost = [one for one in lost if not one.record()["job_id"] and not one.done()]
        time.sleep(_POLL_SECONDS)
