"""Start, resume and cancel a sweep: one run for each point, some of them at a time.

All runs are written before the first one starts, so a mistake in any point is reported before
anything is submitted; where a sampler chooses the points, only those at the ends are read then. A
separate process starts the runs; what two points have in common is computed by the first and reused
by the second, as between any two runs. Where the cluster can have jobs wait for each other, the
points are runs ahead, and that process submits the jobs of all of them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from redco_flow.errors import ConfigError, Problem, UsageError
from redco_flow.launch.disk_reserve import refuse_full_disk
from redco_flow.orchestrate.run.cancel import cancel_runs, has_ended, is_driven
from redco_flow.orchestrate.run.ingredients import CodeState
from redco_flow.orchestrate.run.start import (
    check_run,
    refuse_to_start_over,
    reopen_run,
    start_process,
    write_run,
)
from redco_flow.orchestrate.run.state import LaunchRecord
from redco_flow.orchestrate.sweep.planned_jobs import PlannedPoint, check_packs, packed_stages
from redco_flow.orchestrate.sweep.search import Search, require_optuna
from redco_flow.orchestrate.sweep.successive_halving import SuccessiveHalving
from redco_flow.records import write_json
from redco_flow.spec.profile import LOCAL_LAUNCHER
from redco_flow.spec.sweep_points import Point
from redco_flow.tracking.attempt import State
from redco_flow.tracking.locks import find_holder
from redco_flow.tracking.process_identity import utc_now
from redco_flow.tracking.run_directory import RunDirectory
from redco_flow.tracking.sweep_directory import SweepDirectory, SweepPoint
from redco_flow.tracking.typed_records import unless_damaged
from redco_flow.tracking.workspace import Workspace

_POLL_SECONDS = 0.05


def plan_points(
    points: Sequence[Point], load: Callable[[Point], PlannedPoint]
) -> list[PlannedPoint]:
    """Read and plan every point.

    Args:
        load: reads one point's pipeline, with its overrides after all others.

    Raises:
        ConfigError: the mistakes of all points, each once.
    """
    planned: list[PlannedPoint] = []
    problems: list[Problem] = []
    for point in points:
        try:
            planned.append(load(point))
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return planned


def start_sweep(
    planned: Sequence[PlannedPoint],
    workspace: Workspace,
    *,
    max_parallel: int,
    profile_name: str,
    overrides: Sequence[str],
    argv: Sequence[str],
    ahead: bool = False,
    points_per_job: int | None = None,
    early_stopping: SuccessiveHalving | None = None,
) -> SweepDirectory:
    """Write a run for each point, and start the process that starts them.

    Args:
        planned: at least one.
        max_parallel: how many runs at once.
        overrides: of all points.
        ahead: the user requested that all jobs are queued at once.
        points_per_job: points that one job computes; None: each has jobs of its own.
        early_stopping: how trainings that are not among the best are stopped; None: they are not.

    Raises:
        UsageError, DoesNotFit: a point's run cannot be one, or not as it was asked; there is no
            run.
        RedcoFlowError: the process did not come up.
    """
    _check(planned)
    ahead, packed = check_submission(planned, workspace, ahead=ahead, points_per_job=points_per_job)
    sweep = SweepDirectory.create(workspace, planned[0].pipeline.name)
    code = CodeState.read(Path.cwd())
    points = []
    first: RunDirectory | None = None
    for point, stages in zip(planned, packed, strict=True):
        run = write_run(
            point.pipeline,
            point.profile,
            workspace,
            point.plan,
            profile_name=profile_name,
            overrides=[*overrides, *point.overrides],
            argv=argv,
            ahead=ahead,
            sweep=sweep.id,
            code=code,
            like=first,
        )
        first = first or run
        points.append(SweepPoint(run.id, list(point.overrides), stages))
    settings = asdict(early_stopping) if early_stopping is not None else None
    sweep.write(
        points,
        max_parallel=max_parallel,
        argv=argv,
        ahead=ahead,
        points_per_job=points_per_job,
        early_stopping=settings,
    )
    _spawn(sweep)
    return sweep


def start_search(
    ends: Sequence[PlannedPoint],
    workspace: Workspace,
    search: Search,
    *,
    max_parallel: int,
    argv: Sequence[str],
    early_stopping: SuccessiveHalving | None = None,
) -> SweepDirectory:
    """Start the process that makes and starts the points of a sweep, each by those before it.

    Args:
        ends: points at the ends of all distributions, which become no runs.
        search: how the points are chosen.
        max_parallel, early_stopping: as of `start_sweep`.

    Raises:
        UsageError, DoesNotFit, WorkspaceError: there can be no such runs; there is no sweep.
        RedcoFlowError: the process did not come up.
    """
    _check(ends)
    refuse_full_disk(workspace.root)
    sweep = SweepDirectory.create(workspace, ends[0].pipeline.name)
    LaunchRecord.of_this_process(
        workspace.root, ends[0].profile, stage_profiles=ends[0].pipeline.profiles
    ).write(sweep)
    settings = asdict(early_stopping) if early_stopping is not None else None
    sweep.write(
        (),
        max_parallel=max_parallel,
        argv=argv,
        early_stopping=settings,
        search=asdict(search),
    )
    _spawn(sweep)
    return sweep


def _check(planned: Sequence[PlannedPoint]) -> None:
    """Raise where the run of a point cannot be one of a sweep."""
    for point in planned:
        check_run(point.pipeline, point.profile, point.plan)
    if any(point.profile.launcher != LOCAL_LAUNCHER for point in planned):
        raise UsageError(
            f"a sweep is driven by a process on this machine, not by a job (launcher: "
            f"{planned[0].profile.launcher}): add --launcher {LOCAL_LAUNCHER}. Where jobs can wait "
            f"for each other, those of all points are queued at once, and that process may end."
        )


def check_submission(
    planned: Sequence[PlannedPoint],
    workspace: Workspace,
    *,
    ahead: bool,
    points_per_job: int | None,
) -> tuple[bool, list[list[str]]]:
    """Return whether the jobs of all points can be queued at once, and each point's packed stages.

    Args:
        ahead, points_per_job: as of `start_sweep`.

    Raises:
        ConfigError, DoesNotFit, UsageError: what is asked for cannot be; says why.
    """
    packed: list[list[str]] = [[] for _ in planned]
    if points_per_job is not None:
        packed = packed_stages(planned, workspace, points_per_job)
        check_packs(planned, packed, points_per_job, os.environ)
    return goes_ahead(planned, workspace, asked=ahead or points_per_job is not None), packed


def goes_ahead(planned: Sequence[PlannedPoint], workspace: Workspace, *, asked: bool) -> bool:
    """Return whether the jobs of all points can be queued at once, waiting for each other.

    Args:
        asked: the user wants it.

    Raises:
        UsageError: it is asked for and cannot be; says why.
    """
    from redco_flow.orchestrate.run.rendering import rendered_submissions

    try:
        for one in planned:
            given = (one.pipeline, one.profile, workspace, one.plan, os.environ)
            dict(rendered_submissions(*given, ahead=True, after_others=True))
    except UsageError:
        if asked:
            raise
        return False
    return True


def resume_sweep(sweep: SweepDirectory) -> None:
    """Continue a sweep's runs that have not completed; those that are driven go on as they do.

    A run that was stopped early stays as it is.

    Raises:
        UsageError: it is driven by a process, all its runs have completed, or one of them has a
            checkpoint that this version cannot continue.
    """
    _refuse_if_driven(sweep)
    states = {run: unless_damaged(run.read_state) for run in sweep.runs}
    done = (State.COMPLETED, State.STOPPED_EARLY)
    left = [run for run, state in states.items() if state and state["state"] not in done]
    if sweep.num_open:
        require_optuna()
    elif not left:
        raise UsageError(
            f"sweep {sweep.id}: every run of it is completed or was stopped early; nothing to "
            f"resume. `redco-flow resume RUN` continues a run that was stopped early."
        )
    without_orchestrator = [run for run in left if find_holder(run) is None]
    for run in without_orchestrator:
        refuse_to_start_over(run)  # before any of them is changed
    sweep.cancel_path.unlink(missing_ok=True)
    for run in without_orchestrator:
        reopen_run(run)
    _spawn(sweep)


def cancel_sweep(sweep: SweepDirectory, reason: str) -> None:
    """Start no further run and stop those that have not ended; waits for their ends.

    Raises:
        UsageError: all of them have ended.
    """
    left = [run for run in sweep.runs if not has_ended(run)]
    if not left and State.WAITING not in sweep.states_without_runs:
        raise UsageError(f"sweep {sweep.id} has ended already.")
    request_cancel(sweep, reason)
    unseen: set[str] = set()
    while is_driven(sweep, unseen):
        time.sleep(_POLL_SECONDS)
    # The last first: of points that wait for others, none begins meanwhile.
    cancel_runs(reversed(sweep.runs), reason)


def request_cancel(sweep: SweepDirectory, reason: str) -> None:
    """Ask the process that drives a sweep to start no further run."""
    write_json(sweep.cancel_path, {"time": utc_now(), "reason": reason})


def _refuse_if_driven(sweep: SweepDirectory) -> None:
    holder = find_holder(sweep)
    if holder is not None:
        raise UsageError(
            f"sweep {sweep.id} is driven by process {holder.holder.pid} on {holder.holder.host}; "
            f"`redco-flow status {sweep.id}` shows it, `redco-flow cancel {sweep.id}` stops it."
        )


def _spawn(sweep: SweepDirectory) -> None:
    """Start the process that drives the runs."""
    start_process(
        sweep,
        f"sweep {sweep.id}",
        ["redco_flow.orchestrate.sweep.process", str(sweep.path)],
        LaunchRecord.read(sweep if sweep.search is not None else sweep.runs[0]),
        # Runs of reused stages may be over before we look.
        is_over=lambda: not sweep.num_open and all(map(has_ended, sweep.runs)),
    )
