"""Sweeps on the command line: start, follow, print, report and stop one."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from redco_flow.cli.arguments import positive
from redco_flow.cli.fit import choose_settings, refuse_unfit
from redco_flow.cli.loading import Loaded, Loader
from redco_flow.cli.text import columns, duration, number
from redco_flow.cli.view import LIVE_STATES, read_run_view
from redco_flow.errors import RedcoFlowError, UsageError
from redco_flow.tracking.attempt import State
from redco_flow.tracking.locks import Lease, find_holder
from redco_flow.tracking.process_identity import utc_now
from redco_flow.tracking.run_directory import RunDirectory
from redco_flow.tracking.sweep_directory import SweepDirectory
from redco_flow.tracking.workspace import Workspace

if TYPE_CHECKING:
    from redco_flow.orchestrate.sweep.control import PlannedPoint
    from redco_flow.orchestrate.sweep.search import Search
    from redco_flow.orchestrate.sweep.successive_halving import SuccessiveHalving
    from redco_flow.report.compared_run import ComparedRun
    from redco_flow.report.runs_page import RunsPage
    from redco_flow.spec.sweep_points import Point


_NUM_METRICS_SHOWN = 4
_MARKS = {"min": "lowest", "max": "highest"}


def read_sweep_view(sweep: SweepDirectory) -> dict[str, Any]:
    """Return the sweep's points with their runs' states and metrics, and the best of each metric.

    Of a point that a sampler gave, the score is among the metrics.
    A metric by which not all completed points can be compared has no best one; `not_compared`
    says why.
    A point whose turn has not come is WAITING while a process drives the sweep's runs, or while
    its jobs are in a cluster's queue.
    """
    # Imported here: the verbs that never look at a sweep need not pay for it.
    from redco_flow.report.compared_run import ComparedRun

    starter = find_holder(sweep)
    is_driven, is_queued = starter is not None, False
    points: list[dict[str, Any]] = []
    completed: list[ComparedRun] = []
    search, sampled = sweep.search or {}, sweep.read_sampled_points()
    metric = f"{search.get('stage')}/{search.get('metric')}"
    scores = {one.run: {metric: one.score} for one in sampled if one.score is not None}
    for point in sweep.points:
        directory = sweep.run_of(point)
        run = read_run_view(directory)
        is_queued |= run["queued"]
        points.append(
            {
                "point": point.overrides,
                "run": point.run,
                "state": _point_state(directory, run, starter, is_ahead=sweep.is_ahead),
                "message": run["message"],
                "seconds": run["seconds"],
                "metrics": scores.get(point.run, {}) | run["metrics"],
            }
        )
        if points[-1]["state"] == State.COMPLETED:
            completed.append(ComparedRun(directory, view=run))
    not_compared = dict(_not_compared(completed))
    states = [*(point["state"] for point in points), *sweep.states_without_runs]
    refused = [one for one in sampled if one.state == "refused"]
    return {
        "sweep": sweep.id,
        "state": state_of_sweep(states, goes_on=is_driven or is_queued),
        "queued": is_queued and not is_driven,
        "points": points,
        "num_open": sweep.num_open,
        "problem": sweep.problem,
        "refused": [{"point": one.overrides, "message": one.message} for one in refused],
        "best": _best(
            [one for one in points if one["state"] == State.COMPLETED], completed, not_compared
        ),
        "not_compared": not_compared,
    }


def sweep_text(view: dict[str, Any]) -> str:
    """One sweep for people: a line for each point, then the best ones."""
    points = view["points"]
    done = sum(point["state"] == State.COMPLETED for point in points)
    num_stopped = sum(point["state"] == State.STOPPED_EARLY for point in points)
    stopped = f", {num_stopped} stopped early" if num_stopped else ""
    num_points = len(points) + len(view["refused"]) + view["num_open"]
    lines = [f"{view['sweep']}: {view['state']}  {done} of {num_points} points completed{stopped}"]
    shown = _shown_metrics(view)
    rows = [
        [
            "  ".join(point["point"]),
            point["run"],
            point["state"],
            duration(point["seconds"]),
            *(number(point["metrics"].get(name)) for name in shown),
            point["message"] if point["state"] in (State.WAITING, State.STOPPED_EARLY) else "",
        ]
        for point in points
    ]
    lines.append(columns(rows, ["POINT", "RUN", "STATE", "TIME", *shown, ""]))
    for point in points:
        if point["state"] == State.FAILED:
            lines.append(f"{point['run']}: {point['message'].partition(chr(10))[0]}")
    for one in view["refused"]:
        lines.append(f"{_named(one['point'])}: refused: {one['message']}")
    for name, best in view["best"].items():
        where = "  ".join(best["point"])
        lines.append(f"{best['is']} {name}: {number(best['value'])}  {where}  ({best['run']})")
    lines += [f"no best {name}: {why}" for name, why in view["not_compared"].items()]
    if view["queued"]:
        lines.append(
            f"its jobs run without a launcher; `redco-flow resume {view['sweep']}` collects them."
        )
    if view["state"] == State.INTERRUPTED:
        lines.append(
            f"no process drives its runs; `redco-flow resume {view['sweep']}` continues the sweep."
        )
    if view["num_open"] and view["problem"]:
        lines.append(f"the next of {view['num_open']} points cannot be made: {view['problem']}")
    return "\n".join(lines)


def _shown_metrics(view: dict[str, Any]) -> list[str]:
    """The metrics that have columns: those with a best point, then others, a few in all."""
    names = dict.fromkeys(view["best"])
    names |= dict.fromkeys(name for point in view["points"] for name in point["metrics"])
    return list(names)[:_NUM_METRICS_SHOWN]


def _not_compared(runs: Sequence[ComparedRun]) -> Iterator[tuple[str, str]]:
    """The metrics by which the completed points cannot be compared, and why."""
    from redco_flow.report.compared_run import metric_names, not_compared

    for name in metric_names(runs):
        for run, why in not_compared(name, runs).items():
            yield name, f"{run} is {why}"
            break


def _best(
    points: list[dict[str, Any]], runs: Sequence[ComparedRun], not_compared: Mapping[str, str]
) -> dict[str, Any]:
    # Imported here: the verbs that never look at a sweep need not pay for it.
    from redco_flow.report.compared_run import direction, metric_names

    found = {}
    for name in metric_names(runs):
        way = "" if name in not_compared else direction(name, runs)
        having = [point for point in points if name in point["metrics"]]
        if way and len(having) > 1:
            pick = min if way == "min" else max
            best = pick(having, key=lambda point: point["metrics"][name])
            found[name] = {
                "is": _MARKS[way],
                "value": best["metrics"][name],
                "point": best["point"],
                "run": best["run"],
            }
    return found


def _point_state(
    run: RunDirectory, view: dict[str, Any], starter: Lease | None, *, is_ahead: bool
) -> str:
    """A run's state as a point's: one without an orchestrator is waiting while it is to get one.

    Args:
        starter: who drives the sweep's runs.
        is_ahead: all their jobs are queued at once.
    """
    state = str(view["state"])
    if state == State.PENDING:
        return State.WAITING
    if starter is None:
        return state
    if is_ahead and state == State.RUNNING and not _has_begun(view):
        return State.WAITING  # its jobs are being submitted, or are in the queue
    # A lease that is left shows that its process was killed; a process that ends well removes it.
    if state == State.INTERRUPTED and not run.lease_path.exists():
        if view["seconds"] is None:
            return State.WAITING
        return State.RUNNING if is_ahead else state  # its jobs have ended: it gets a driver now
    return state


def _has_begun(view: dict[str, Any]) -> bool:
    """Whether a stage of the run has run, or a job of one is at work."""
    stages = view["stages"].values()
    return any(
        stage["state"] not in (State.PENDING, State.WAITING) and not stage["reused"]
        for stage in stages
    )


def state_of_sweep(states: Sequence[str], *, goes_on: bool) -> str:
    """Return a sweep's state by its points'.

    Args:
        goes_on: a process drives its runs, or their jobs are in a queue.
    """
    if goes_on or any(state in LIVE_STATES for state in states):
        return State.RUNNING
    for state in (State.INTERRUPTED, State.WAITING):
        if state in states:
            return State.INTERRUPTED
    return next(
        (state for state in (State.FAILED, State.CANCELLED) if state in states), State.COMPLETED
    )


def read_sweep_page(sweep: SweepDirectory) -> RunsPage:
    """Return a sweep's page as it is now."""
    # Imported here: the verbs that never look at a sweep need not pay for it.
    from redco_flow.report.compared_run import ComparedRun
    from redco_flow.report.sweep_page import SweptRun, sweep_page

    points = [
        SweptRun(ComparedRun(sweep.run_of(point), _named(point.overrides)), point.overrides)
        for point in sweep.points
    ]
    return sweep_page(sweep.id, str(read_sweep_view(sweep)["state"]), points, utc_now())


def write_sweep_page(sweep: SweepDirectory, path: Path | None = None) -> Path:
    """Write a sweep's page, in its directory if nowhere else, and return its path.

    Raises:
        OSError: it cannot be written: the disk is full or read-only; names the path.
    """
    from redco_flow.report.runs_page import write_page

    return write_page(read_sweep_page(sweep), path or sweep.report_path)


DETACHED_EXIT_CODE = 130
_MOST_LAUNCHERS = 4  # which may be killed one after the other while a run is followed
Seen = TypeVar("Seen")
_EXIT_CODES = {State.COMPLETED: 0, State.CANCELLED: 5}
_POLL_SECONDS = 0.5


def add_sweep(parser: argparse.ArgumentParser) -> None:
    """Add the options of several runs of one pipeline."""
    parser.add_argument(
        "--sweep",
        action="append",
        default=[],
        metavar="KEY=V1,V2",
        help="one run per value; several --sweep run every combination; "
        "uniform(A, B), loguniform(A, B) or randint(A, B) in place of values draws them",
    )
    parser.add_argument(
        "--num-samples",
        type=positive,
        default=0,
        metavar="N",
        help="draws from the distributions of --sweep; with --sampler tpe: points",
    )
    parser.add_argument(
        "--sampler",
        choices=("random", "tpe"),
        help="random draws all points before the start (default); tpe has Optuna choose each point "
        "by the scores of those that have ended",
    )
    parser.add_argument(
        "--metric",
        metavar="METRIC",
        help="with --sampler tpe: the score, as METRIC or STAGE/METRIC (default: that of "
        "--stop-early)",
    )
    parser.add_argument(
        "--sweep-seed", type=int, default=0, metavar="N", help="seed of those draws (default: 0)"
    )
    parser.add_argument(
        "--points",
        type=Path,
        metavar="FILE",
        help="one run per row of settings in a .csv or .jsonl file, with each of --sweep",
    )
    parser.add_argument(
        "--max-parallel",
        type=positive,
        metavar="N",
        help="concurrent runs of the sweep (default: the profile's max_parallel_stages)",
    )
    parser.add_argument(
        "--stop-early",
        metavar="METRIC",
        help="stop trainings of the sweep that are not among the best by this METRIC or "
        "STAGE/METRIC (ASHA)",
    )
    parser.add_argument(
        "--min-steps",
        type=positive,
        metavar="N",
        help="with --stop-early: steps after which trainings are first compared",
    )
    parser.add_argument(
        "--reduction-factor",
        type=_factor,
        metavar="N",
        help="with --stop-early: one in N trainings continues (default: 4); the next comparison "
        "is after N times as many steps",
    )
    parser.add_argument(
        "--mode",
        choices=("min", "max"),
        help="with --stop-early or --metric: which value is better, where the stage does not "
        "declare it",
    )


def _factor(text: str) -> int:
    if (number := positive(text)) < 2:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 1")
    return number


def run_sweep(
    options: argparse.Namespace,
    loader: Loader,
    print_plan: Callable[[PlannedPoint], None],
) -> int:
    """Plan every point, then start and follow the sweep.

    Args:
        loader: of the command's options.
        print_plan: for a dry run.
    """
    from redco_flow.orchestrate.run.objectives import ExpectedStarts
    from redco_flow.orchestrate.sweep.control import (
        PlannedPoint,
        plan_points,
        start_search,
        start_sweep,
    )

    points_loaded: list[Loaded] = []

    def load_point(point: Point) -> PlannedPoint:
        loaded = loader.load(point)
        points_loaded.append(loaded)
        return PlannedPoint(point, loaded.pipeline, loaded.profile, loaded.plan)

    planned = plan_points(choose_points(options), load_point)
    workspaces = [loaded.workspace for loaded in points_loaded]
    if len({workspace.root for workspace in workspaces}) > 1:
        raise UsageError("--sweep over workspaces: the points of a sweep share one; leave it out.")
    is_search = options.sampler == "tpe"
    if is_search:
        _refuse_open_settings(planned)
    # Points whose programs are equal find the first one's search in the cache.
    starts = None if options.dry_run else ExpectedStarts()
    chosen = [
        choose_settings(one, compiles=not options.dry_run, starts=starts) for one in points_loaded
    ]
    notes = dict.fromkeys(note for one in chosen for note in one.notes)
    sys.stderr.writelines(f"note: {note}\n" for note in notes)
    if options.fit is not False and not options.dry_run:
        refuse_unfit([found for one in chosen for found in one.fits.items()])
    planned = [
        replace(point, pipeline=one.loaded.pipeline)
        for point, one in zip(planned, chosen, strict=True)
    ]
    early_stopping = _read_early_stopping(options, planned, workspaces[0])
    max_parallel = options.max_parallel or planned[0].profile.max_parallel_stages
    if is_search:
        search = _read_search(options, planned, workspaces[0])
        if options.dry_run:
            _print_search(search, planned[0], max_parallel, options, print_plan)
            return 0
        sweep = start_search(
            planned,
            workspaces[0],
            search,
            max_parallel=max_parallel,
            argv=sys.argv,
            early_stopping=early_stopping,
        )
        return _attend_started(sweep, planned[:1], options)
    if options.dry_run:
        for point in planned:
            print_plan(point)
        _print_jobs(planned, workspaces[0], max_parallel, options)
        return 0
    sweep = start_sweep(
        planned,
        workspaces[0],
        max_parallel=max_parallel,
        profile_name=options.profile,
        overrides=options.overrides,
        argv=sys.argv,
        ahead=options.ahead,
        early_stopping=early_stopping,
    )
    return _attend_started(sweep, planned, options)


def _attend_started(
    sweep: SweepDirectory, planned: Sequence[PlannedPoint], options: argparse.Namespace
) -> int:
    pins = dict.fromkeys(pin for point in planned for pin in point.plan.pins)
    sys.stderr.writelines(f"{pin}\n" for pin in pins)
    sys.stderr.write(f"{sweep.id} started: {sweep.num_points} points; its files: {sweep.path}\n")
    return attend_sweep(sweep, options)


def choose_points(options: argparse.Namespace) -> list[Point]:
    """Return the sweep's points; where a sampler is to choose them, those at the ends."""
    from redco_flow.spec.sweep_points import Samples, ends_of, read_points, read_space

    if options.sampler != "tpe":
        if options.metric:
            raise UsageError("--metric is for --sampler tpe; leave it out.")
        samples = Samples(options.num_samples, options.sweep_seed)
        return read_points(
            options.sweep, samples, options.points, lambda line: print(line, file=sys.stderr)
        )
    from redco_flow.orchestrate.sweep.search import require_optuna
    from redco_flow.spec.overrides import PROFILE_PREFIX

    require_optuna()
    if options.points:
        raise UsageError("--points gives the points, and --sampler tpe chooses them: omit one.")
    if options.ahead:
        raise UsageError(
            "--ahead submits all points at once, and --sampler tpe chooses each by those before "
            "it: omit one."
        )
    if not options.num_samples:
        raise UsageError("--sampler tpe needs --num-samples N: the number of points.")
    if not (options.metric or options.stop_early):
        raise UsageError("--sampler tpe needs --metric METRIC: the score that chooses points.")
    space = read_space(options.sweep)
    for key in space:
        if key.startswith(PROFILE_PREFIX) or "runs_on" in key.split("."):
            raise UsageError(f"--sampler tpe: {key} is of a profile; leave it out.")
    return ends_of(space)


def _refuse_open_settings(ends: Sequence[PlannedPoint]) -> None:
    """Raise where a search would have to choose settings again for each point."""
    from redco_flow.orchestrate.run.fit import search_word, searching_stages

    for stage in (one for end in ends for one in searching_stages(end.pipeline, end.plan)):
        raise UsageError(
            f"--sampler tpe: stage '{stage.name}' has `mesh: {search_word(stage)}`, which is "
            f"searched before a sweep starts: write the mesh that `redco-flow plan --fit` finds."
        )


def _read_search(
    options: argparse.Namespace, ends: Sequence[PlannedPoint], workspace: Workspace
) -> Search:
    from redco_flow.orchestrate.sweep.search import Search
    from redco_flow.orchestrate.sweep.watched_metric import read_watched_metric

    watched = read_watched_metric(
        "--metric" if options.metric else "--stop-early",
        options.metric or options.stop_early,
        [point.pipeline for point in ends],
        workspace,
        mode=options.mode,
    )
    _refuse_left_out(watched.stage, ends)
    pipeline = ends[0].pipeline
    return Search(
        sampler=options.sampler,
        seed=options.sweep_seed,
        number=options.num_samples,
        settings=options.sweep,
        **asdict(watched),
        path=str(pipeline.path),
        text=pipeline.path.read_text(encoding="utf-8"),
        overrides=options.overrides,
        profile_name=options.profile,
        from_stage=options.from_stage,
        until_stage=options.until_stage,
        force=options.force,
        documents=[point.pipeline.document for point in ends],
    )


def _refuse_left_out(stage: str, planned: Sequence[PlannedPoint]) -> None:
    """Raise where the stage whose metric is watched is not part of a point."""
    if any(point.plan.stages[stage].action == "skip" for point in planned):
        raise UsageError(
            f"stage '{stage}' logs the metric by which points are compared, and --from or --until "
            f"leaves it out: name an earlier stage with --from, or a later one with --until."
        )


def _print_search(
    search: Search,
    point: PlannedPoint,
    max_parallel: int,
    options: argparse.Namespace,
    print_plan: Callable[[PlannedPoint], None],
) -> None:
    """Print the plan of one point, and what is known of all."""
    print_plan(point)
    if options.json:
        known = {"sampler": search.sampler, "points": search.number, "sweep": search.settings}
        metric = {"metric": f"{search.stage}/{search.metric}", "mode": search.mode}
        print(json.dumps({**known, **metric, "at_once": max_parallel}))
        return
    print(f"\n--- {search.describe(max_parallel)}")


def _read_early_stopping(
    options: argparse.Namespace, planned: Sequence[PlannedPoint], workspace: Workspace
) -> SuccessiveHalving | None:
    from redco_flow.orchestrate.sweep.watched_metric import read_early_stopping

    if not options.stop_early:
        for option in ("min_steps", "reduction_factor", *(() if options.metric else ("mode",))):
            if getattr(options, option):
                raise UsageError(f"--{option.replace('_', '-')} is for --stop-early METRIC.")
        return None
    if options.num_samples == 1 and options.sampler == "tpe":
        planned = planned[:1]  # it stands for the only point: there is nothing to compare
    early_stopping = read_early_stopping(
        options.stop_early,
        [point.pipeline for point in planned],
        workspace,
        mode=options.mode,
        min_steps=options.min_steps or 0,
        reduction_factor=options.reduction_factor or 4,
    )
    _refuse_left_out(early_stopping.stage, planned)
    return early_stopping


def _print_jobs(
    planned: Sequence[PlannedPoint],
    workspace: Workspace,
    max_parallel: int,
    options: argparse.Namespace,
) -> None:
    """Print what would be submitted, if the jobs of all points would be queued at once.

    Raises:
        UsageError: that was asked for and cannot be.
    """
    from redco_flow.orchestrate.sweep.control import goes_ahead
    from redco_flow.orchestrate.sweep.process import planned_jobs

    is_ahead = goes_ahead(planned, workspace, asked=options.ahead)
    jobs = list(planned_jobs(planned if is_ahead else [], workspace))
    if options.json:
        print(json.dumps({"jobs": [one.to_json() for one in jobs], "at_once": max_parallel}))
        return
    print(f"\n--- at most {max_parallel} of {len(planned)} points at a time")
    if jobs:
        print("--- would be submitted at once")
        print("\n".join(one.describe() for one in jobs))


def attend_sweep(sweep: SweepDirectory, options: argparse.Namespace) -> int:
    """Follow the sweep unless it is detached, then compare its points."""
    as_json = getattr(options, "json", False)
    if getattr(options, "detach", False):
        print(json.dumps({"sweep": sweep.id, "state": State.RUNNING}) if as_json else sweep.id)
        return 0
    try:
        view = _follow_to_end(sweep)
    except KeyboardInterrupt:
        sys.stderr.write(
            f"\ndetached; {sweep.id} continues. `redco-flow attach {sweep.id}` follows it again, "
            f"`redco-flow cancel {sweep.id}` stops it.\n"
        )
        return DETACHED_EXIT_CODE
    print(json.dumps(view) if as_json else sweep_text(view))
    try:
        sys.stderr.write(f"report: {write_sweep_page(sweep)}\n")
    except (RedcoFlowError, OSError, ValueError) as error:  # the sweep itself went as it went
        sys.stderr.write(f"warning: the sweep's page could not be written: {error}\n")
    return _EXIT_CODES.get(view["state"], 1)


def _follow_to_end(sweep: SweepDirectory) -> dict[str, Any]:
    """Follow the sweep; where its process is killed meanwhile, have another one continue it."""
    from redco_flow.orchestrate.sweep.control import resume_sweep

    def follow() -> tuple[dict[str, Any], bool]:
        view = _follow(sweep)
        is_interrupted = view["state"] == State.INTERRUPTED
        return view, is_interrupted and not sweep.cancel_path.exists()

    return follow_launchers(sweep, follow, lambda: resume_sweep(sweep))


def follow_launchers(
    leased: RunDirectory | SweepDirectory,
    follow: Callable[[], tuple[Seen, bool]],
    resume: Callable[[], None],
) -> Seen:
    """Follow a run or a sweep; where its process is killed, have another one continue it.

    Args:
        follow: returns what was seen at the end, and whether that was an interruption.
    """
    for launcher in range(1, _MOST_LAUNCHERS + 1):
        seen, is_interrupted = follow()
        # A lease that is left shows that its process was killed; one that detaches removes it.
        was_killed = is_interrupted and (leased.path / "lease.json").exists()
        if not was_killed or launcher == _MOST_LAUNCHERS:
            break
        sys.stderr.write(f"the launcher of {leased.id} was killed; another one continues\n")
        try:
            resume()
        except UsageError as error:
            if find_holder(leased) is None:  # no other process has continued it
                sys.stderr.write(f"{error}\n")
                break
    return seen


def _follow(sweep: SweepDirectory) -> dict[str, Any]:
    """Print each change of a point's state; return the sweep's final view."""
    said: dict[str, str] = {}
    while True:
        view = read_sweep_view(sweep)
        for point in view["points"]:
            if said.get(point["run"], State.WAITING) != point["state"]:
                said[point["run"]] = point["state"]
                sys.stderr.write(f"{_named(point['point'])}: {point['state']}  {point['run']}\n")
        sys.stderr.flush()
        if view["state"] != State.RUNNING:
            return view
        time.sleep(_POLL_SECONDS)


def _named(point: Sequence[str]) -> str:
    return "  ".join(point)
