"""Verbs that look at runs: ls, status, logs, attach."""

from __future__ import annotations

import argparse
import json
from typing import Any

from redco_flow.cli.arguments import Verbs, add_json, add_run, add_workspace, workspace_path
from redco_flow.cli.following import DETACHED_EXIT_CODE, follow_run, stage_line
from redco_flow.cli.log_printing import follow_logs, print_logs, stage_names
from redco_flow.cli.run_view import LIVE_STATES, read_checked_view, read_run_view
from redco_flow.cli.sweep_view import read_sweep_view, sweep_text
from redco_flow.cli.sweeping import attend_sweep
from redco_flow.cli.text import columns, duration, number
from redco_flow.errors import UsageError
from redco_flow.tracking.run_directory import RunDirectory, find_run, is_damaged, list_runs
from redco_flow.tracking.states import State
from redco_flow.tracking.sweep_directory import find_sweep
from redco_flow.tracking.workspace import Workspace


def register(verbs: Verbs) -> None:
    """Declare the verbs."""
    listing = verbs.add("ls", _list, "list the runs, newest first")
    listing.add_argument("-n", "--last", type=int, default=20, metavar="N", help="how many (20)")
    status = verbs.add("status", _status, "show one run: stages, progress, metrics")
    status.add_argument("--watch", action="store_true", help="follow it until it ends")
    attach = verbs.add("attach", _attach, "follow a run until it ends; Ctrl-C detaches again")
    logs = verbs.add("logs", _logs, "print what a run's stages printed")
    logs.add_argument("run", nargs="?", default="@last", metavar="RUN[/STAGE]")
    logs.add_argument("-f", "--follow", action="store_true", help="go on until the run ends")
    logs.add_argument("-n", "--last", type=int, default=None, metavar="N", help="the last N lines")
    logs.add_argument("--rank", type=int, help="which process, or task of an array (the first)")
    for parser in (status, attach):
        add_run(parser)
    for parser in (listing, status):
        add_json(parser)
    for parser in (listing, status, attach, logs):
        add_workspace(parser)


def _list(options: argparse.Namespace) -> int:
    runs = list_runs(Workspace(workspace_path(options).absolute()))
    shown = [*runs[: options.last], *filter(is_damaged, runs[options.last :])]
    views = [read_checked_view(run, with_lines=False) for run in shown]
    if options.json:
        print(json.dumps(views))
        return 0
    if not views:
        print(f"no runs in {workspace_path(options).absolute()}")
        return 0
    rows = [
        [
            view["run"],
            view["state"] + (" (damaged)" if _is_damaged_inside(view) else ""),
            str(view["created_at"] or "")[:16].replace("T", " "),
            duration(view["seconds"]),
            "  ".join(f"{k} {number(v)}" for k, v in list(view["metrics"].items())[:3]),
            view["sweep"],
        ]
        for view in views
    ]
    has_sweeps = any(view["sweep"] for view in views)
    header = ["RUN", "STATE", "CREATED (UTC)", "TIME", "METRICS", "SWEEP" if has_sweeps else ""]
    print(columns(rows, header))
    return 0


def _is_damaged_inside(view: dict[str, Any]) -> bool:
    """Whether a record is damaged, and not one that the run's state hangs on."""
    return bool(view["damaged"]) and view["state"] != "damaged"


def _find(options: argparse.Namespace, text: str) -> RunDirectory:
    return find_run(Workspace(workspace_path(options).absolute()), text)


def _status(options: argparse.Namespace) -> int:
    workspace = Workspace(workspace_path(options).absolute())
    if (sweep := find_sweep(workspace, options.run)) is not None:
        if options.watch:
            return attend_sweep(sweep, workspace, options)
        view = read_sweep_view(sweep, workspace)
        print(json.dumps(view) if options.json else sweep_text(view))
        return 0
    run = _find(options, options.run)
    if options.watch:
        follow_run(run)
    view = read_checked_view(run, with_lines=True)
    print(json.dumps(view) if options.json else status_text(view))
    return 0


def status_text(view: dict[str, Any]) -> str:
    """One run for people: its stages, then what to read or do next."""
    lines = [f"{view['run']}: {view['state']}  {duration(view['seconds'])}".rstrip()]
    stages = view["stages"]
    lines += [f"  {stage_line(name, stage)}" for name, stage in stages.items()]
    # A failed run's message is its first failed stage's, which stands in that stage's line, and a
    # completed one's counts those lines.
    is_said = any(str(stage["message"]).startswith(view["message"]) for stage in stages.values())
    if view["state"] != State.COMPLETED and not is_said:
        lines.append(view["message"])
    if view["metrics"]:
        lines.append(
            "metrics: " + "  ".join(f"{k} {number(v)}" for k, v in view["metrics"].items())
        )
    for title in ("report", "prefect_url"):
        if view[title]:
            lines.append(f"{title.removesuffix('_url')}: {view[title]}")
    if str(view["prefect_url"] or "").startswith("http://127.0.0.1:"):
        lines.append(f"  (`redco-flow ui {view['run']}` prints a link that lets a browser in)")
    if view["queued"]:
        lines.append(
            f"its jobs go on without a launcher; `redco-flow resume {view['run']}` follows them."
        )
    lines += [damage for damage in view.get("damaged", ()) if damage != view["message"]]
    if view["state"] == State.INTERRUPTED:
        lines.append(f"its launcher is gone; `redco-flow resume {view['run']}` takes it up again.")
    return "\n".join(lines)


def _attach(options: argparse.Namespace) -> int:
    workspace = Workspace(workspace_path(options).absolute())
    if (sweep := find_sweep(workspace, options.run)) is not None:
        return attend_sweep(sweep, workspace, options)
    run = _find(options, options.run)
    code = follow_run(run)
    view = read_run_view(run)
    if view["state"] not in LIVE_STATES:
        print(status_text(view))
    return code


def _logs(options: argparse.Namespace) -> int:
    text, _, stage = options.run.partition("/")
    run = _find_of_logs(options, text or "@last")
    known = stage_names(run)
    if stage and stage not in known:
        raise UsageError(f"run {run.id} has no stage {stage!r}; its stages: {', '.join(known)}.")
    wanted, with_name = ([stage] if stage else known), not stage
    if not options.follow:
        num_last = options.last
        print_logs(run, wanted, rank=options.rank, num_last=num_last, with_name=with_name)
        return 0
    try:
        follow_logs(run, wanted, rank=options.rank, with_name=with_name)
    except KeyboardInterrupt:
        return DETACHED_EXIT_CODE
    return 0


def _find_of_logs(options: argparse.Namespace, text: str) -> RunDirectory:
    """The run; a sweep's points are runs, each with logs of its own."""
    workspace = Workspace(workspace_path(options).absolute())
    if (sweep := find_sweep(workspace, text)) is not None:
        listed = ", ".join(point.run for point in sweep.points)
        raise UsageError(f"{sweep.id} is a sweep; name one of its runs: {listed}.")
    return find_run(workspace, text)
