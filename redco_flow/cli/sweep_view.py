"""A sweep as people see it: follow it, print its points, write its page."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from redco_flow.cli.text import columns, duration, number
from redco_flow.cli.view import LIVE_STATES, read_run_view
from redco_flow.errors import RedcoFlowError, UsageError
from redco_flow.records import change_mark
from redco_flow.tracking.attempt import ENDED_RUN_STATES, State
from redco_flow.tracking.locks import Lease, find_holder
from redco_flow.tracking.process_identity import utc_now
from redco_flow.tracking.run_directory import RunDirectory
from redco_flow.tracking.sweep_directory import SweepDirectory

if TYPE_CHECKING:
    from redco_flow.report.compared_run import ComparedRun
    from redco_flow.report.runs_page import RunsPage

DETACHED_EXIT_CODE = 130
Seen = TypeVar("Seen")
_EXIT_CODES = {State.COMPLETED: 0, State.CANCELLED: 5}
_MARKS = {"min": "lowest", "max": "highest"}
_MOST_LAUNCHERS = 4  # which may be killed one after the other while a run is followed
_NUM_METRICS_SHOWN = 4
_POLL_SECONDS = 0.5
_PAUSE_PER_LOOK = 19.0  # of thousands of points a look takes its time
_MAX_PAUSE = 10.0


class SweepLook(NamedTuple):
    """The states of a sweep's points at one time.

    Args:
        points: each with its overrides, run, state, message, seconds and metrics.
        runs: of the points, in the same order, each with its view.
        is_queued: whether no process drives the runs, and a cluster's queue has their jobs.
        refused: a sampler's points that were refused, each with its overrides and message.
    """

    state: State
    points: list[dict[str, Any]]
    runs: list[tuple[RunDirectory, dict[str, Any]]]
    is_queued: bool
    refused: list[dict[str, Any]]


class SweepReader:
    """Reads the states of a sweep's points repeatedly; those of ended points once."""

    def __init__(self, sweep: SweepDirectory) -> None:
        self._sweep = sweep
        self._ended: dict[str, tuple[tuple[int, int], dict[str, Any]]] = {}

    def look(self) -> SweepLook:
        """Return the states as they are now.

        Of a point that a sampler gave, the score is among the metrics. A point whose turn has not
        come is WAITING while a process drives the sweep's runs, or while its jobs are in a
        cluster's queue.
        """
        sweep = self._sweep
        starter = find_holder(sweep)
        search = sweep.search or {}
        metric = f"{search.get('stage')}/{search.get('metric')}"
        sampled = sweep.read_sampled_points()
        scores = {one.run: {metric: one.score} for one in sampled if one.score is not None}
        points: list[dict[str, Any]] = []
        runs: list[tuple[RunDirectory, dict[str, Any]]] = []
        for point in sweep.points:
            directory = sweep.run_of(point)
            run = self._read_run(directory)
            runs.append((directory, run))
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
        is_driven, is_queued = starter is not None, any(run["queued"] for _, run in runs)
        states = [*(point["state"] for point in points), *sweep.states_without_runs]
        state = state_of_sweep(states, goes_on=is_driven or is_queued)
        refused = [
            {"point": one.overrides, "message": one.message}
            for one in sampled
            if one.state == "refused"
        ]
        return SweepLook(state, points, runs, is_queued and not is_driven, refused)

    def _read_run(self, run: RunDirectory) -> dict[str, Any]:
        mark = change_mark(run.state_path)
        known = self._ended.get(run.id)
        if known is not None and known[0] == mark:
            return known[1]
        view = read_run_view(run)
        if view["state"] in ENDED_RUN_STATES:
            self._ended[run.id] = (mark, view)
        return view


def read_sweep_view(sweep: SweepDirectory, look: SweepLook | None = None) -> dict[str, Any]:
    """Return the sweep's points with their runs' states and metrics, and the best of each metric.

    A metric by which not all completed points can be compared has no best one; `not_compared`
    says why.

    Args:
        look: the states of the points; None: as they are now.
    """
    # Imported here: the verbs that never look at a sweep need not pay for it.
    from redco_flow.report.compared_run import ComparedRun

    state, points, runs, is_queued, refused = look or SweepReader(sweep).look()
    completed = [
        ComparedRun(directory, view=run)
        for point, (directory, run) in zip(points, runs, strict=True)
        if point["state"] == State.COMPLETED
    ]
    not_compared = dict(_not_compared(completed))
    return {
        "sweep": sweep.id,
        "state": state,
        "queued": is_queued,
        "points": points,
        "num_open": sweep.num_open,
        "problem": sweep.problem,
        "refused": refused,
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


def state_of_sweep(states: Sequence[str], *, goes_on: bool) -> State:
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
    reader, said = SweepReader(sweep), dict[str, str]()
    while True:
        looked_at = time.monotonic()
        look = reader.look()
        for point in look.points:
            if said.get(point["run"], State.WAITING) != point["state"]:
                said[point["run"]] = point["state"]
                sys.stderr.write(f"{_named(point['point'])}: {point['state']}  {point['run']}\n")
        sys.stderr.flush()
        if look.state != State.RUNNING:
            return read_sweep_view(sweep, look)
        pause = _PAUSE_PER_LOOK * (time.monotonic() - looked_at)
        time.sleep(min(max(pause, _POLL_SECONDS), _MAX_PAUSE))


def _named(point: Sequence[str]) -> str:
    return "  ".join(point)
