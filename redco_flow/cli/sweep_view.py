"""What a person wants to know of a sweep: its points beside each other, and which one is best.

Reads the runs' files only. A score is best by what its metric says is better; of scores whose
metric says nothing, all are shown and none is called best.
"""

from __future__ import annotations

from typing import Any

from redco_flow.cli.run_view import LIVE_STATES, read_run_view
from redco_flow.cli.text import columns, duration, number
from redco_flow.tracking.artifacts import ArtifactStore
from redco_flow.tracking.lease import Lease, find_holder
from redco_flow.tracking.run_directory import RunDirectory
from redco_flow.tracking.states import State
from redco_flow.tracking.sweep_directory import SweepDirectory
from redco_flow.tracking.workspace import Workspace

_NUM_METRICS_SHOWN = 4
_MARKS = {"min": "lowest", "max": "highest"}


def read_sweep_view(sweep: SweepDirectory, workspace: Workspace) -> dict[str, Any]:
    """Return the sweep's points with their runs' states and metrics, and the best of each metric.

    A point whose turn has not come is WAITING while a process starts the sweep's runs, or while
    its jobs are in a cluster's queue.
    """
    starter = find_holder(sweep)
    is_driven, is_queued = starter is not None, False
    points: list[dict[str, Any]] = []
    directions: dict[str, str] = {}
    for point in sweep.points:
        directory = sweep.run_of(point)
        run = read_run_view(directory)
        directions |= _directions(run, workspace)
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
    return {
        "sweep": sweep.id,
        "state": _state([point["state"] for point in points], goes_on=is_driven or is_queued),
        "queued": is_queued and not is_driven,
        "points": points,
        "best": _best(points, directions),
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
    if view["queued"]:
        lines.append(
            f"its jobs go on without a launcher; `redco-flow resume {view['sweep']}` collects them."
        )
    if view["state"] == State.INTERRUPTED:
        lines.append(f"no process starts its runs; `redco-flow resume {view['sweep']}` goes on.")
    return "\n".join(lines)


def _shown_metrics(view: dict[str, Any]) -> list[str]:
    """The metrics that have columns: those that can be compared, then others, a few in all."""
    names = dict.fromkeys(view["best"])
    names |= dict.fromkeys(name for point in view["points"] for name in point["metrics"])
    return list(names)[:_NUM_METRICS_SHOWN]


def _directions(run: dict[str, Any], workspace: Workspace) -> dict[str, str]:
    """Which way is better, by metric, as the run's evaluations say."""
    store = ArtifactStore(workspace)
    found: dict[str, str] = {}
    for stage in run["stages"].values():
        for output, artifact_id in stage["artifacts"].items():
            artifact = store.find(artifact_id) if output.startswith("metrics") else None
            if artifact is not None:
                found |= artifact.metadata.get("directions") or {}
    return found


def _best(points: list[dict[str, Any]], directions: dict[str, str]) -> dict[str, Any]:
    """The best completed point of each metric that can be compared."""
    # Imported here: the verbs that never look at a sweep need not pay for it.
    from redco_flow.report.metrics_table import direction_of

    completed = [point for point in points if point["state"] == State.COMPLETED]
    found = {}
    for name in dict.fromkeys(name for point in completed for name in point["metrics"]):
        direction = direction_of(name, directions)
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
