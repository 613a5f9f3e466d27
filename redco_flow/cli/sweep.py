"""Sweeps on the command line: their options, their plan and their start."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from redco_flow.cli.arguments import positive
from redco_flow.cli.fit import choose_settings, refuse_unfit
from redco_flow.cli.loading import Loaded, Loader
from redco_flow.cli.sweep_view import attend_sweep
from redco_flow.errors import UsageError
from redco_flow.tracking.sweep_directory import SweepDirectory
from redco_flow.tracking.workspace import Workspace

if TYPE_CHECKING:
    from redco_flow.orchestrate.sweep.planned_jobs import PlannedPoint
    from redco_flow.orchestrate.sweep.search import Search
    from redco_flow.orchestrate.sweep.successive_halving import SuccessiveHalving
    from redco_flow.spec.sweep_points import Point


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
        help="concurrent runs of the sweep (default: the profile's max_parallel_stages); with "
        "--points-per-job: jobs",
    )
    parser.add_argument(
        "--points-per-job",
        type=positive,
        metavar="N",
        help="on Slurm: one job computes N points, one after the other (default: each stage of "
        "each point is a job); for points of seconds or minutes",
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
    from redco_flow.orchestrate.sweep.control import plan_points, start_search, start_sweep
    from redco_flow.orchestrate.sweep.planned_jobs import PlannedPoint

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
        points_per_job=options.points_per_job,
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
    for option, given in (("ahead", options.ahead), ("points-per-job", options.points_per_job)):
        if given:
            raise UsageError(
                f"--{option} submits points before others have ended, and --sampler tpe chooses "
                f"each by those before it: omit one."
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
    from redco_flow.orchestrate.sweep.control import check_submission
    from redco_flow.orchestrate.sweep.planned_jobs import planned_jobs

    size = options.points_per_job
    is_ahead, _ = check_submission(planned, workspace, ahead=options.ahead, points_per_job=size)
    jobs = list(planned_jobs(planned if is_ahead else [], workspace, size))
    if options.json:
        print(json.dumps({"jobs": [one.to_json() for one in jobs], "at_once": max_parallel}))
        return
    print(f"\n--- at most {max_parallel} of {len(planned)} points at a time")
    if jobs:
        print("--- would be submitted at once")
        print("\n".join(one.describe() for one in jobs))
