"""The command line's part in a sweep: start it, follow it, take it up again, stop it."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from redco_flow.cli.loading import Loader
from redco_flow.cli.text import columns, duration, number
from redco_flow.cli.view import LIVE_STATES, read_run_view
from redco_flow.errors import RedcoFlowError, UsageError
from redco_flow.tracking.artifacts import ArtifactStore
from redco_flow.tracking.attempt import State
from redco_flow.tracking.lineage import run_results
from redco_flow.tracking.locks import Lease, find_holder
from redco_flow.tracking.process_identity import utc_now
from redco_flow.tracking.run_directory import RunDirectory
from redco_flow.tracking.score_identity import ScoreIdentity, identify_scores
from redco_flow.tracking.sweep_directory import SweepDirectory
from redco_flow.tracking.typed_records import unless_damaged
from redco_flow.tracking.workspace import Workspace

if TYPE_CHECKING:
    from redco_flow.orchestrate.sweep.control import PlannedPoint
    from redco_flow.spec.overrides import Point


_NUM_METRICS_SHOWN = 4
_MARKS = {"min": "lowest", "max": "highest"}


def read_sweep_view(sweep: SweepDirectory, workspace: Workspace) -> dict[str, Any]:
    """Return the sweep's points with their runs' states and metrics, and the best of each metric.

    A metric by which not all completed points can be compared has no best one; `not_compared`
    says why.
    A point whose turn has not come is WAITING while a process starts the sweep's runs, or while
    its jobs are in a cluster's queue.
    """
    starter = find_holder(sweep)
    is_driven, is_queued = starter is not None, False
    points: list[dict[str, Any]] = []
    directions: dict[str, str] = {}
    identities: dict[str, Mapping[str, ScoreIdentity]] = {}
    for point in sweep.points:
        directory = sweep.run_of(point)
        run = read_run_view(directory)
        directions |= _directions(run, workspace)
        identities[point.run] = _identities(directory, run, workspace)
        is_queued |= run["queued"]
        points.append(
            {
                "point": point.overrides,
                "run": point.run,
                "state": _point_state(directory, run, starter, is_ahead=sweep.is_ahead),
                "message": run["message"],
                "seconds": run["seconds"],
                "metrics": run["metrics"],
            }
        )
    not_compared = dict(_not_compared(points, identities))
    return {
        "sweep": sweep.id,
        "state": _state([point["state"] for point in points], goes_on=is_driven or is_queued),
        "queued": is_queued and not is_driven,
        "points": points,
        "best": _best(points, directions, not_compared),
        "not_compared": not_compared,
    }


def sweep_text(view: dict[str, Any]) -> str:
    """One sweep for people: a line for each point, then the best ones."""
    points = view["points"]
    done = sum(point["state"] == State.COMPLETED for point in points)
    lines = [f"{view['sweep']}: {view['state']}  {done} of {len(points)} points completed"]
    shown = _shown_metrics(view)
    rows = [
        [
            "  ".join(point["point"]),
            point["run"],
            point["state"],
            duration(point["seconds"]),
            *(number(point["metrics"].get(name)) for name in shown),
            point["message"] if point["state"] == State.WAITING else "",
        ]
        for point in points
    ]
    lines.append(columns(rows, ["POINT", "RUN", "STATE", "TIME", *shown, ""]))
    for point in points:
        if point["state"] == State.FAILED:
            lines.append(f"{point['run']}: {point['message'].partition(chr(10))[0]}")
    for name, best in view["best"].items():
        where = "  ".join(best["point"])
        lines.append(f"{best['is']} {name}: {number(best['value'])}  {where}  ({best['run']})")
    lines += [f"no best {name}: {why}" for name, why in view["not_compared"].items()]
    if view["queued"]:
        lines.append(
            f"its jobs go on without a launcher; `redco-flow resume {view['sweep']}` collects them."
        )
    if view["state"] == State.INTERRUPTED:
        lines.append(f"no process starts its runs; `redco-flow resume {view['sweep']}` goes on.")
    return "\n".join(lines)


def _shown_metrics(view: dict[str, Any]) -> list[str]:
    """The metrics that have columns: those with a best point, then others, a few in all."""
    names = dict.fromkeys(view["best"])
    names |= dict.fromkeys(name for point in view["points"] for name in point["metrics"])
    return list(names)[:_NUM_METRICS_SHOWN]


def _directions(run: dict[str, Any], workspace: Workspace) -> dict[str, str]:
    """Return the better direction of each metric, as recorded by the run's evaluations."""
    store = ArtifactStore(workspace)
    found: dict[str, str] = {}
    for stage in run["stages"].values():
        for output, artifact_id in stage["artifacts"].items():
            artifact = store.find(artifact_id) if output.startswith("metrics") else None
            if artifact is not None:
                found |= artifact.metadata.get("directions") or {}
    return found


def _identities(
    run: RunDirectory, view: dict[str, Any], workspace: Workspace
) -> Mapping[str, ScoreIdentity]:
    """Return the identities of a completed run's scores: data and metrics; else nothing."""
    if view["state"] != State.COMPLETED:
        return {}
    stages = (unless_damaged(run.read_state) or {}).get("stages") or {}
    results = unless_damaged(lambda: run_results(workspace, run)) or {}
    return identify_scores(stages, results, ArtifactStore(workspace))


def _not_compared(
    points: Sequence[dict[str, Any]], identities: Mapping[str, Mapping[str, ScoreIdentity]]
) -> Iterator[tuple[str, str]]:
    """The metrics by which the completed points cannot be compared, and why."""
    completed = [point for point in points if point["state"] == State.COMPLETED]
    for name in dict.fromkeys(name for point in completed for name in point["metrics"]):
        first, *others = [point["run"] for point in completed if name in point["metrics"]]
        measured = identities[first].get(name, ScoreIdentity())
        for run in others:
            why = measured.comparable_with(identities[run].get(name, ScoreIdentity()))
            if why:
                yield name, f"{run} cannot be compared with {first} ({why})"
                break


def _best(
    points: list[dict[str, Any]], directions: dict[str, str], not_compared: Mapping[str, str]
) -> dict[str, Any]:
    # Imported here: the verbs that never look at a sweep need not pay for it.
    from redco_flow.report.metrics import direction_of

    completed = [point for point in points if point["state"] == State.COMPLETED]
    found = {}
    for name in dict.fromkeys(name for point in completed for name in point["metrics"]):
        direction = "" if name in not_compared else direction_of(name, directions)
        having = [point for point in completed if name in point["metrics"]]
        if direction and len(having) > 1:
            sign = 1 if direction == "min" else -1
            best = having[min(range(len(having)), key=lambda i: sign * having[i]["metrics"][name])]
            found[name] = {
                "is": _MARKS[direction],
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
        starter: who starts the sweep's runs.
        is_ahead: their jobs all stand in a cluster's queue.
    """
    state = str(view["state"])
    if state == State.PENDING:
        return State.WAITING
    if starter is None:
        return state
    holder = find_holder(run)
    if holder is not None and holder.holder == starter.holder:
        return State.WAITING  # its jobs are just being submitted
    # A lease that is left shows that its process was killed; who ends well takes it along.
    if state == State.INTERRUPTED and not run.lease_path.exists():
        if view["seconds"] is None:
            return State.WAITING
        return State.RUNNING if is_ahead else state  # its jobs have ended: it gets a driver now
    return state


def _state(states: list[str], *, goes_on: bool) -> str:
    if goes_on or any(state in LIVE_STATES for state in states):
        return State.RUNNING
    for state in (State.INTERRUPTED, State.WAITING):
        if state in states:
            return State.INTERRUPTED
    return next(
        (state for state in (State.FAILED, State.CANCELLED) if state in states), State.COMPLETED
    )


def write_sweep_page(sweep: SweepDirectory, workspace: Workspace, path: Path | None = None) -> Path:
    """Write a sweep's page, in its directory if nowhere else, and return its path.

    Raises:
        OSError: it cannot be written: the disk is full or read-only; names the path.
    """
    # Imported here: the verbs that never look at a sweep need not pay for it.
    from redco_flow.report.comparison import read_compared
    from redco_flow.report.runs_page import write_page
    from redco_flow.report.sweep_page import SweptRun, sweep_page

    points = [
        SweptRun(read_compared(sweep.run_of(point), _named(point.overrides)), point.overrides)
        for point in sweep.points
    ]
    state = str(read_sweep_view(sweep, workspace)["state"])
    return write_page(sweep_page(sweep.id, state, points, utc_now()), path or sweep.report_path)


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
    from redco_flow.orchestrate.sweep.control import PlannedPoint, plan_points, start_sweep
    from redco_flow.spec.overrides import read_points

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
    pins = dict.fromkeys(pin for point in planned for pin in point.plan.pins)
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
    from redco_flow.orchestrate.sweep.control import goes_ahead
    from redco_flow.orchestrate.sweep.process import planned_jobs

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
    try:
        sys.stderr.write(f"report: {write_sweep_page(sweep, workspace)}\n")
    except (RedcoFlowError, OSError, ValueError) as error:  # the sweep itself went as it went
        sys.stderr.write(f"warning: the sweep's page could not be written: {error}\n")
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
