"""The process that drives a sweep's runs: `python -m redco_flow.orchestrate.sweep.process SWEEP`.

Detached, so it outlives the terminal. Drives each run that has not ended and has no orchestrator,
at most `max_parallel` at a time, all in this process; where a sampler chooses the points, it makes
the next one when there is room for it. If the process dies, jobs run on, and `resume_sweep`
continues the runs.

Where the cluster supports job dependencies, the jobs of all points are submitted first. From then
on no process is needed; a run is driven when one of its jobs has begun.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from redco_flow.errors import RedcoFlowError, UsageError
from redco_flow.launch.endings import never_began, write_exit
from redco_flow.launch.executor import CallJob, reattach
from redco_flow.orchestrate.prefect.sweep_page import SweepPage
from redco_flow.orchestrate.run.ahead import SweepQueue
from redco_flow.orchestrate.run.cancel import Log, StopRequest, cancel_runs, has_ended
from redco_flow.orchestrate.run.driver import Driver, open_session
from redco_flow.orchestrate.run.groups import jobs_of_groups
from redco_flow.orchestrate.run.ingredients import Sources, stage_ingredients
from redco_flow.orchestrate.run.orchestrator import run_and_exit
from redco_flow.orchestrate.run.plan import Plan, upstream_of
from redco_flow.orchestrate.run.session import RunSession
from redco_flow.orchestrate.run.state import StateStore, note_takeover
from redco_flow.orchestrate.sweep.control import PlannedPoint, request_cancel
from redco_flow.orchestrate.sweep.early_stopping import EarlyStopping
from redco_flow.orchestrate.sweep.search import PointMaker
from redco_flow.records import digest_json
from redco_flow.spec.load import ResolvedPipeline
from redco_flow.tracking.attempt import AttemptDirectory, Cause, State
from redco_flow.tracking.locks import acquire, find_holder
from redco_flow.tracking.process_identity import utc_now
from redco_flow.tracking.results import fingerprint
from redco_flow.tracking.run_directory import RunDirectory
from redco_flow.tracking.sweep_directory import SweepDirectory, current_attempt
from redco_flow.tracking.workspace import Workspace

_POLL_SECONDS = 0.5
_PAUSE_PER_LOOK = 9.0
_SECONDS_FOR_PREFECT_TO_CLOSE = 180.0


def main(arguments: Sequence[str]) -> int:
    """Drive all runs, in order; return when all have ended."""
    sweep, driver = SweepDirectory(Path(arguments[0])), Driver()
    driver.take_signals()
    with SweepPage(sweep, on_cancel=partial(_cancel, sweep)) as page:
        try:
            with acquire(sweep):
                _drive_runs(sweep, driver)
        except RedcoFlowError as error:
            _log(str(error))
            return error.exit_code
        finally:
            driver.wait()
            if page.is_cancelled:  # the points that had not started, and their jobs in the queue
                cancel_runs(reversed(sweep.runs), page.reason)
            page.close(_SECONDS_FOR_PREFECT_TO_CLOSE)
    return 0


def _cancel(sweep: SweepDirectory, reason: str) -> None:
    request_cancel(sweep, reason)
    for run in sweep.runs:
        if not has_ended(run):
            run.request_cancel(reason)


def _drive_runs(sweep: SweepDirectory, driver: Driver) -> None:
    left = [run for run in sweep.runs if not has_ended(run)]
    elsewhere = [run for run in left if find_holder(run) is not None]
    waiting = [run for run in left if run not in elsewhere]
    early = EarlyStopping(sweep, _log) if sweep.record.get("early_stopping") else None
    if early is not None:
        for run in {*sweep.runs} - {*waiting}:
            early.watch(run)
    stopped = {run.id for run in waiting if early is not None and early.has_stopped(run)}
    to_submit = [run for run in waiting if run.id not in stopped]
    jobs = _submit(sweep, to_submit, driver) if sweep.is_ahead else {}
    maker = PointMaker(sweep, _log) if sweep.search is not None else None
    while not sweep.cancel_path.exists() and not driver.is_stopped:
        if early is not None:
            early.look()
        elsewhere = [run for run in elsewhere if find_holder(run) is not None]
        num_at_work = driver.num_driving + len(elsewhere)
        looked_at = time.monotonic()
        has_room = num_at_work < sweep.record["max_parallel"]
        if maker is not None and not waiting and has_room and maker.is_due:
            waiting += filter(None, [maker.make()])
            continue
        if not waiting and not num_at_work and not (maker is not None and maker.is_open):
            if maker is not None:
                maker.record_scores()
            return
        ready = next((run for run in waiting if _is_ready(run, jobs)), None) if has_room else None
        if ready is None:
            # Of thousands of points a look takes its time.
            seconds = _PAUSE_PER_LOOK * (time.monotonic() - looked_at)
            driver.wait_for_an_end(max(_POLL_SECONDS, seconds))
            continue
        waiting.remove(ready)
        # It may have been cancelled while it waited. The retry budgets apply to what ended before.
        judges_ended = bool(jobs) or ready.id in stopped
        if not has_ended(ready) and not _start(ready, driver, judges_ended=judges_ended):
            elsewhere.append(ready)
        elif early is not None:
            early.watch(ready)
        driver.wait_for_an_end(0)


def _is_ready(run: RunDirectory, jobs: Mapping[str, PointJobs]) -> bool:
    """Whether a run may start: at any time, or when its jobs need an orchestrator."""
    return run.id not in jobs or jobs[run.id].need_orchestrator()


def _submit(
    sweep: SweepDirectory, runs: Sequence[RunDirectory], driver: Driver
) -> dict[str, PointJobs]:
    submit_points(sweep, runs, _log, driver)
    return {run.id: PointJobs(run) for run in runs}


def _start(run: RunDirectory, driver: Driver, *, judges_ended: bool) -> bool:
    """Begin to drive a run; where that cannot be, the log says why, and the other runs go on."""
    _log(f"starts {run.id}")
    try:
        driver.start(run, judges_ended=judges_ended)
    except (RedcoFlowError, OSError) as error:
        _log(str(error))
        return False
    return True


def _log(line: str) -> None:
    sys.stderr.write(f"{utc_now()} {line}\n")
    sys.stderr.flush()


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
class StageJobs:
    """The jobs that a sweep has for one stage, or for those of a group.

    Args:
        stage: or "data, train", of stages that share a job, which is each point's own.
        points: which need the stage's result and do not have it.
        jobs: what is submitted for them; less where points make the same.
        upstream: stages that the jobs wait for.
    """

    stage: str
    points: int
    jobs: int
    upstream: tuple[str, ...] = ()

    def describe(self) -> str:
        """For people: "train: 4 jobs, after preprocess"."""
        counted = "1 job" if self.jobs == 1 else f"{self.jobs} jobs"
        for_all = f", for {self.points} points" if self.points > self.jobs else ""
        after = f", after {', '.join(self.upstream)}" if self.upstream else ""
        return f"{self.stage}: {counted}{for_all}{after}"

    def to_json(self) -> dict[str, Any]:
        """Return the same as a record."""
        return asdict(self)


def work_keys(
    pipeline: ResolvedPipeline, workspace: Workspace, sources: Sources | None = None
) -> dict[str, str]:
    """Return a key for each stage: of two stages with one key, one result serves both.

    Unlike a fingerprint it is known before the stages that it takes from have run.

    Args:
        sources: code and data as they are now, shared by a sweep's points.

    Raises:
        WorkspaceError: a data file is missing or unreadable.
    """
    keys: dict[str, str] = {}
    for name, stage in pipeline.stages.items():
        taken = {
            slot: [[one.artifact or keys[one.stage], one.output] for one in references]
            for slot, references in stage.inputs.items()
        }
        ingredients = fingerprint(stage_ingredients(stage, {}, workspace, sources))
        keys[name] = digest_json({"ingredients": ingredients, "inputs": taken})
    return keys


def planned_jobs(points: Sequence[PlannedPoint], workspace: Workspace) -> Iterator[StageJobs]:
    """Yield what would be submitted for each stage, before there is a sweep."""
    sources = Sources()
    found: dict[tuple[str, ...], list[tuple[str, StageJobs]]] = {}  # by the stages of a job
    for number, point in enumerate(points):
        pipeline, plan = point.pipeline, point.plan
        keys = work_keys(pipeline, workspace, sources)
        groups = [stages for _, stages in jobs_of_groups(pipeline, point.profile, plan)]
        alone = set(pipeline.stages).difference(*groups)
        for stages in [*groups, *((name,) for name in pipeline.stages if name in alone)]:
            first = pipeline.stages[stages[0]]
            if _is_open(plan, first.name):
                key = keys[first.name] if first.config.group is None else f"point {number}"
                upstream = tuple(name for name in upstream_of(first) if _is_open(plan, name))
                made = StageJobs(", ".join(stages), 1, 1, upstream)
                found.setdefault(stages, []).append((key, made))
    order = list(dict.fromkeys(name for point in points for name in point.pipeline.stages))
    for stages in sorted(found, key=lambda stages: order.index(stages[0])):
        jobs = found[stages]
        yield replace(jobs[0][1], points=len(jobs), jobs=len({key for key, _ in jobs}))


def _is_open(plan: Plan, stage: str) -> bool:
    return plan.stages[stage].action in ("run", "wait")


@dataclass(frozen=True)
class _Point:
    """One point of a sweep, whose run's lease is held here.

    Args:
        keys: by stage, as `work_keys` returns them.
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
    sources = Sources()
    with ExitStack() as leases:
        points = []
        for run in runs:
            try:
                note_takeover(run, leases.enter_context(acquire(run)))
            except UsageError as error:
                log(str(error))
                continue
            try:
                points.append(_open_point(run, sources))
            except RedcoFlowError as error:  # its orchestrator records it in the run
                log(f"{run.id}: {error}")
        _resolve_lost_ids(sweep, points, driver)
        _submit_in_order(sweep, points, log, driver)


def _submit_in_order(
    sweep: SweepDirectory, points: Sequence[_Point], log: Log, driver: Driver
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
        point.session.submit_ahead(_log_of(point, log), queue)
        if point.session.is_cut:
            log("the cluster takes no more jobs for now: the other points start as points end")
            return
        if jobs := point.open_jobs():
            before.append(jobs)


def _log_of(point: _Point, log: Log) -> Log:
    return lambda line: log(f"{point.run.id}: {line}")


def _open_point(run: RunDirectory, sources: Sources) -> _Point:
    session = open_session(run, StateStore(run), StopRequest(), leave_cancelled=False)
    context = session.context
    return _Point(session, work_keys(context.pipeline, context.workspace, sources))


def _resolve_lost_ids(sweep: SweepDirectory, points: Sequence[_Point], driver: Driver) -> None:
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
        for job in [one for one in lost if one.status().cause is Cause.NEVER_SUBMITTED]:
            why = "the cluster never got it"
            write_exit(job.attempt, never_began(why))
        lost = [one for one in lost if not one.record()["job_id"] and not one.done()]
        time.sleep(_POLL_SECONDS)


if __name__ == "__main__":
    run_and_exit(main)
