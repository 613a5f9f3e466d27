"""The command line's part in a sweep: start it, follow it, take it up again, stop it."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from redco_flow.cli.loading import Loader
from redco_flow.cli.sweep_view import read_sweep_view, sweep_text
from redco_flow.errors import UsageError
from redco_flow.tracking.states import State
from redco_flow.tracking.sweep_directory import SweepDirectory
from redco_flow.tracking.workspace import Workspace

if TYPE_CHECKING:
    from redco_flow.orchestrate.sweeping import PlannedPoint
    from redco_flow.spec.sweep import Point

DETACHED_EXIT_CODE = 130
_EXIT_CODES = {State.COMPLETED: 0, State.CANCELLED: 5}
_POLL_SECONDS = 0.5


def add_sweep(parser: argparse.ArgumentParser) -> None:
    """--sweep, --max-parallel: several runs of one pipeline."""
    parser.add_argument(
        "--sweep",
        action="append",
        default=[],
        metavar="KEY=V1,V2",
        help="a run for each value; several --sweep give every combination",
    )
    parser.add_argument(
        "--max-parallel",
        type=_positive,
        metavar="N",
        help="runs of the sweep at once (the profile's max_parallel_stages)",
    )


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(text)
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
    from redco_flow.orchestrate.sweeping import PlannedPoint, plan_points, start_sweep
    from redco_flow.spec.sweep import read_points

    workspaces: list[Workspace] = []

    def load_point(point: Point) -> PlannedPoint:
        loaded = loader.load(point)
        workspaces.append(loaded.workspace)
        return PlannedPoint(point, loaded.pipeline, loaded.profile, loaded.plan)

    planned = plan_points(read_points(options.sweep), load_point)
    if len({workspace.root for workspace in workspaces}) > 1:
        raise UsageError("--sweep over workspaces: the points of a sweep share one; leave it out.")
    max_parallel = options.max_parallel or planned[0].profile.max_parallel_stages
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
    )
    pins = dict.fromkeys(pin for point in planned for pin in point.plan.hub)
    sys.stderr.writelines(f"{pin}\n" for pin in pins)
    sys.stderr.write(f"{sweep.id} started: {len(planned)} points; its files: {sweep.path}\n")
    return attend_sweep(sweep, workspaces[0], options)


def _print_jobs(
    planned: Sequence[PlannedPoint],
    workspace: Workspace,
    max_parallel: int,
    options: argparse.Namespace,
) -> None:
    """Say what would be submitted, where the jobs of all points would stand in the queue at once.

    Raises:
        UsageError: that was asked for and cannot be.
    """
    from redco_flow.orchestrate.sweep_work import planned_jobs
    from redco_flow.orchestrate.sweeping import goes_ahead

    is_ahead = goes_ahead(planned, workspace, asked=options.ahead)
    points = [(one.pipeline, one.plan) for one in planned] if is_ahead else []
    jobs = list(planned_jobs(points, workspace))
    if options.json:
        print(json.dumps({"jobs": [one.to_json() for one in jobs], "at_once": max_parallel}))
        return
    print(f"\n--- at most {max_parallel} of {len(planned)} points at a time")
    if jobs:
        print("--- would be submitted at once")
        print("\n".join(one.describe() for one in jobs))


def attend_sweep(sweep: SweepDirectory, workspace: Workspace, options: argparse.Namespace) -> int:
    """Follow the sweep unless told not to, then compare its points."""
    as_json = getattr(options, "json", False)
    if getattr(options, "detach", False):
        print(json.dumps({"sweep": sweep.id, "state": State.RUNNING}) if as_json else sweep.id)
        return 0
    try:
        view = _follow(sweep, workspace)
    except KeyboardInterrupt:
        sys.stderr.write(
            f"\ndetached; {sweep.id} goes on. `redco-flow attach {sweep.id}` comes back, "
            f"`redco-flow cancel {sweep.id}` stops it.\n"
        )
        return DETACHED_EXIT_CODE
    print(json.dumps(view) if as_json else sweep_text(view))
    return _EXIT_CODES.get(view["state"], 1)


def _follow(sweep: SweepDirectory, workspace: Workspace) -> dict[str, Any]:
    """Say what becomes of each point as it does; return the sweep's end."""
    said: dict[str, str] = {}
    while True:
        view = read_sweep_view(sweep, workspace)
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
