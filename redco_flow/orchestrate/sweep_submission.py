"""Submit the runs of all points of a sweep ahead, one after the other, before any has a driver.

What an earlier point already makes is not submitted again: the run waits for that point's job. A
point's first job waits for the end of the point that is `max_parallel` before it. Each run's jobs
are found again as those of any run ahead: submitting twice submits nothing twice.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from redco_flow.errors import RedcoFlowError, UsageError
from redco_flow.launch.endings import never_began, write_exit
from redco_flow.launch.executor import CallJob, reattach
from redco_flow.orchestrate.ahead import SweepTurn
from redco_flow.orchestrate.driving import open_session
from redco_flow.orchestrate.ingredients import Sources
from redco_flow.orchestrate.run_context import Say
from redco_flow.orchestrate.session import RunSession
from redco_flow.orchestrate.state_book import StateBook, note_takeover
from redco_flow.orchestrate.stopping import StopRequest
from redco_flow.orchestrate.sweep_work import work_keys
from redco_flow.tracking.attempt import AttemptDirectory
from redco_flow.tracking.lease import acquire
from redco_flow.tracking.run_directory import RunDirectory
from redco_flow.tracking.states import Cause
from redco_flow.tracking.sweep_directory import SweepDirectory

_POLL_SECONDS = 0.2


@dataclass(frozen=True)
class _Point:
    """One point of a sweep, whose run's lease is held here.

    Args:
        keys: by stage; `sweep_work.work_keys`.
    """

    session: RunSession
    keys: Mapping[str, str]

    @property
    def run(self) -> RunDirectory:
        return self.session.context.run

    def open_jobs(self) -> list[CallJob]:
        """The jobs of the run's own stages that have left no record of their end."""
        return [
            reattach(record)
            for attempt in self._attempts()
            if (record := attempt.read_job()) and attempt.read_exit() is None
        ]

    def stands_in_queue(self) -> bool:
        """Whether it has jobs, none of which has failed."""
        causes = {attempt.cause for attempt in self._attempts()}
        return None in causes and causes <= {None, Cause.COMPLETED}

    def _attempts(self) -> list[AttemptDirectory]:
        found = map(self.run.latest_attempt, self.session.upstream)
        return [attempt for attempt in found if attempt is not None]


def submit_points(sweep: SweepDirectory, runs: Sequence[RunDirectory], say: Say) -> None:
    """Bring the jobs of a sweep's runs into the queue, under the runs' leases.

    Runs that another process drives are left to it. What cannot be submitted has its error in the
    log, and is tried again, alone, by the driver of its point.
    """
    sources = Sources()
    with ExitStack() as leases:
        points = []
        for run in runs:
            try:
                note_takeover(run, leases.enter_context(acquire(run)))
            except UsageError as error:
                say(str(error))
                continue
            try:
                points.append(_open_point(run, sources))
            except RedcoFlowError as error:  # its driver will say so in the run's own records
                say(f"{run.id}: {error}")
        _settle_lost_ids(sweep, points)
        _submit_in_turn(sweep, points, say)


def _submit_in_turn(sweep: SweepDirectory, points: Sequence[_Point], say: Say) -> None:
    """Submit point after point; stop early where the sweep is cancelled."""
    num_at_once = sweep.record["max_parallel"]
    before: deque[list[CallJob]] = deque([[]] * num_at_once, maxlen=num_at_once)
    makers: dict[str, AttemptDirectory] = {}
    # Those that stand in the queue come first: a point that is tried again waits behind them.
    for point in sorted(points, key=lambda one: not one.stands_in_queue()):
        if sweep.cancel_path.exists():
            return
        turn = SweepTurn(point.keys, makers, before[0])
        point.session.submit_ahead(_say_of(point, say), turn)
        if jobs := point.open_jobs():
            before.append(jobs)


def _say_of(point: _Point, say: Say) -> Say:
    """Lines that begin with the point's run."""
    return lambda line: say(f"{point.run.id}: {line}")


def _open_point(run: RunDirectory, sources: Sources) -> _Point:
    session = open_session(run, StateBook(run), StopRequest(), leave_cancelled=False)
    context = session.context
    return _Point(session, work_keys(context.pipeline, context.workspace, sources))


def _settle_lost_ids(sweep: SweepDirectory, points: Sequence[_Point]) -> None:
    """Have jobs whose ids were lost found by their names, all at once.

    Of an attempt that the cluster never got, its record says so: it is submitted anew.
    """
    lost = [job for point in points for job in point.open_jobs() if not job.record()["job_id"]]
    while lost and not sweep.cancel_path.exists():
        for job in [one for one in lost if one.status().cause is Cause.NEVER_SUBMITTED]:
            why = "the cluster never got it"
            write_exit(job.attempt, never_began(why))
        lost = [one for one in lost if not one.record()["job_id"] and not one.done()]
        time.sleep(_POLL_SECONDS)
