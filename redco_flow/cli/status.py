"""Verbs that look at runs: ls, status, logs, attach; and how a run is followed."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from redco_flow.cli.arguments import (
    Verbs,
    add_json,
    add_run,
    add_workspace,
    positive,
    workspace_of,
    workspace_path,
)
from redco_flow.cli.logs import follow_logs, print_logs, stage_names
from redco_flow.cli.sweep_view import attend_sweep, read_sweep_view, sweep_text
from redco_flow.cli.text import columns, duration, number, short_id, size
from redco_flow.cli.view import (
    LIVE_STATES,
    read_checked_view,
    read_run_view,
    with_aliases,
    with_fits,
    with_goodput,
)
from redco_flow.errors import UsageError
from redco_flow.records import change_mark
from redco_flow.terminal_text import plain, visible
from redco_flow.tracking.attempt import State
from redco_flow.tracking.locks import find_holder
from redco_flow.tracking.run_directory import RunDirectory, list_damaged, list_runs
from redco_flow.tracking.sweep_directory import find_single_run, find_sweep
from redco_flow.tracking.workspace import Workspace

if TYPE_CHECKING:
    from rich.table import Table


DETACHED_EXIT_CODE = 130
INTERRUPTED_EXIT_CODE = 1
_POLL_SECONDS = 0.1
_SECONDS_BETWEEN_FRAMES = 0.25
_SECONDS_WITHOUT_NEWS = 1.0
_SECONDS_TO_WRITE_REPORT = 20.0
_SECONDS_BETWEEN_PROGRESS_LINES = 10.0
_CHANGING = (State.RUNNING, State.WAITING)
_MARKS = {
    State.COMPLETED: "✓", State.FAILED: "✗", State.CANCELLED: "■", State.RUNNING: "●",
    State.WAITING: "…", State.PENDING: " ", State.SKIPPED: "-", State.STOPPED_EARLY: "■",
}  # fmt: skip
_COLOURS = {
    State.COMPLETED: "green",
    State.FAILED: "red",
    State.CANCELLED: "yellow",
    State.STOPPED_EARLY: "yellow",
    State.RUNNING: "cyan",
}


def follow_run(run: RunDirectory) -> int:
    """Show the run on standard error until it ends.

    Returns:
        The run's exit code; 130 after Ctrl-C, which detaches and leaves the run alone.
    """
    out = sys.stderr
    try:
        view = _follow_live(run) if _is_terminal(out) else _follow_quietly(run, out)
    except KeyboardInterrupt:
        out.write(
            f"\ndetached; {run.id} continues. `redco-flow attach {run.id}` follows it again, "
            f"`redco-flow cancel {run.id}` stops it.\n"
        )
        return DETACHED_EXIT_CODE
    _wait_for_report(run)
    return exit_code_of(view)


def _wait_for_report(run: RunDirectory) -> None:
    """Wait until the launcher gave up the run: it writes the report after the run's end."""
    deadline = time.monotonic() + _SECONDS_TO_WRITE_REPORT
    while find_holder(run) is not None and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)


def exit_code_of(view: dict[str, Any]) -> int:
    """The exit code of an ended or interrupted run."""
    if view["state"] == State.INTERRUPTED:
        return INTERRUPTED_EXIT_CODE
    return int(view["exit_code"] or 0)


def progress_text(progress: dict[str, Any] | None) -> str:
    """Step, loss, speed and time left of a running stage, as far as it said."""
    if not progress:
        return ""
    phase = str(progress.get("phase") or "")
    parts = [phase]
    if progress.get("step") is not None:
        total = progress.get("total_steps")
        count = f"{progress['step']}" + (f"/{total}" if total else "")
        # Elsewhere it counts rows, answers or blocks.
        parts.append(f"step {count}" if phase == "training" else f"{count} done")
    if progress.get("loss") is not None:
        parts.append(f"loss {number(float(progress['loss']))}")
    if progress.get("tokens_per_second") is not None:
        parts.append(f"{progress['tokens_per_second']:,.0f} tokens/s")
    if progress.get("seconds_left") is not None:
        parts.append(f"{duration(progress['seconds_left'])} left")
    return " · ".join(part for part in parts if part)


def render_table(view: dict[str, Any]) -> Table:
    """The run as a Rich table."""
    from rich.markup import escape
    from rich.table import Table

    told = f"  {phase_text(view)}" if phase_text(view) else ""
    title = escape(f"{view['run']}  {view['state']}{told}")
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for title in ("", "stage", "state", "time", "progress"):
        table.add_column(title, no_wrap=title in ("stage", "state", "time"))
    for name, stage in view["stages"].items():
        colour = _COLOURS.get(stage["state"], "")
        state = "reused" if stage["reused"] else stage["state"]
        table.add_row(
            f"[{colour}]{_MARKS.get(stage['state'], '?')}[/]" if colour else "",
            name,
            state,
            " on ".join(filter(None, [duration(stage["seconds"]), _devices_text(stage)])),
            escape(visible(_stage_detail(stage))),
        )
    return table


def phase_text(view: dict[str, Any]) -> str:
    """Describe what the launcher does before the first stage; empty once one has begun."""
    if view["state"] not in LIVE_STATES:
        return ""
    return str(view["message"]) or (
        "starting the launcher" if view["state"] == State.PENDING else ""
    )


def stage_line(name: str, stage: dict[str, Any]) -> str:
    """One stage as one quiet line."""
    state = "reused" if stage["reused"] else stage["state"]
    took = f" in {duration(stage['seconds'])}" if stage["seconds"] and not stage["reused"] else ""
    took += f" on {_devices_text(stage)}" if stage["devices"] else ""
    detail = _stage_detail(stage)
    if detail.startswith(f"{state}: "):  # "waiting: QOSMaxSubmitJobPerUserLimit"
        return f"{name}: {detail}"
    return f"{name}: {state}{took}" + (f"  {detail}" if detail else "")


def _devices_text(stage: dict[str, Any]) -> str:
    """The devices of a stage, and how well it uses them as far as it said."""
    parts = [str(stage["devices"] or "")]
    if stage["tflops_per_device"] is not None:
        parts.append(f"{stage['tflops_per_device']:.3g} TFLOP/s a device")
    if stage["mfu"] is not None:
        parts.append(f"MFU {stage['mfu']:.1%}")
    if stage["peak_memory_bytes"] is not None:
        parts.append(f"peak memory {size(stage['peak_memory_bytes'])} a device")
    return ", ".join(filter(None, parts))


def _stage_detail(stage: dict[str, Any]) -> str:
    if stage["state"] == State.RUNNING:
        return stage["message"] or progress_text(stage["progress"])
    if stage["state"] == State.COMPLETED:
        made = [_output_text(stage, key, id) for key, id in stage["artifacts"].items()]
        return "  ".join([*made, *([stage["message"]] if stage["message"] else [])])
    return str(stage["message"]).partition("\n")[0]


def _output_text(stage: dict[str, Any], key: str, artifact_id: str) -> str:
    """An output with its id and, where they were asked for, its aliases."""
    notes = [*stage.get("aliases", {}).get(key, ())]
    notes += ["deleted"] if key in stage.get("deleted", {}) else []
    return f"{key} {short_id(artifact_id)}" + (f" ({', '.join(notes)})" if notes else "")


def _is_terminal(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def _follow_live(run: RunDirectory) -> dict[str, Any]:
    from rich.console import Console
    from rich.live import Live

    view = read_run_view(run)
    console = Console(file=plain(sys.stderr))
    with Live(render_table(view), console=console, refresh_per_second=4) as live:
        while view["state"] in LIVE_STATES:
            time.sleep(_SECONDS_BETWEEN_FRAMES)
            view = read_run_view(run)
            live.update(render_table(view))
    return view


def _follow_quietly(run: RunDirectory, out: TextIO) -> dict[str, Any]:
    said: dict[str, tuple[str, int | None]] = {}
    last_line: dict[str, str] = {}
    phase = ""
    next_progress = time.monotonic() + _SECONDS_BETWEEN_PROGRESS_LINES
    while True:
        mark = change_mark(run.state_path)
        view = read_run_view(run)
        is_due = time.monotonic() >= next_progress
        # A run that is resumed is pending until its launcher has read how it ended before.
        is_taken_up = view["state"] != State.PENDING
        if phase_text(view) != phase:
            phase = phase_text(view)
            out.write(f"{view['run']}: {phase}\n" if phase else "")
        for name, stage in view["stages"].items() if is_taken_up else ():
            key = (stage["state"], stage["attempt"])
            is_news = (
                said.get(name, (State.PENDING, None)) != key and stage["state"] != State.PENDING
            )
            line = stage_line(name, stage)
            if is_news or (is_due and stage["state"] in _CHANGING and line != last_line.get(name)):
                out.write(f"{line}\n")
                said[name], last_line[name] = key, line
        out.flush()
        if view["state"] not in LIVE_STATES:
            return view
        if is_due:
            next_progress = time.monotonic() + _SECONDS_BETWEEN_PROGRESS_LINES
        _wait_for_news(run, mark)


def _wait_for_news(run: RunDirectory, mark: tuple[int, int]) -> None:
    """Wait until state.json changes, at most a moment: a launcher that was killed writes nothing.

    Args:
        mark: of state.json before it was last read.
    """
    deadline = time.monotonic() + _SECONDS_WITHOUT_NEWS
    while change_mark(run.state_path) == mark and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)


def register(verbs: Verbs) -> None:
    """Declare the verbs."""
    listing = verbs.add("ls", _list)
    listing.add_argument(
        "-n", "--last", type=positive, default=20, metavar="N", help="number of runs (20)"
    )
    listing.add_argument(
        "--size", action="store_true", help="also the disk space of records, artifacts and work"
    )
    status = verbs.add("status", _status)
    status.add_argument("--watch", action="store_true", help="follow the run until it ends")
    attach = verbs.add("attach", _attach)
    logs = verbs.add("logs", _logs)
    logs.add_argument(
        "run",
        nargs="?",
        default="@last",
        metavar="RUN[/STAGE]",
        help="run id or a prefix of it, and one of its stages; default: last, the last run",
    )
    logs.add_argument(
        "-f", "--follow", action="store_true", help="follow the log until the run ends"
    )
    logs.add_argument(
        "-n", "--last", type=positive, default=None, metavar="N", help="the last N lines"
    )
    logs.add_argument("--rank", type=int, help="process, or task of an array (default: the first)")
    for parser in (status, attach):
        add_run(parser)
    for parser in (listing, status):
        add_json(parser)
    for parser in (listing, status, attach, logs):
        add_workspace(parser)


def _list(options: argparse.Namespace) -> int:
    runs = list_runs(workspace_of(options))
    shown = [*runs[: options.last], *list_damaged(runs[options.last :])]
    views = [read_checked_view(run, with_lines=False) for run in shown]
    if options.size:
        views = [{**view, **_run_size(run)} for run, view in zip(shown, views, strict=True)]
    if options.json:
        print(json.dumps(views))
        return 0
    if not views:
        print(f"no runs in {workspace_path(options).absolute()}")
        return 0
    rows = [
        [
            view["run"],
            view["state"] + _marks(view),
            str(view["created_at"] or "")[:16].replace("T", " "),
            duration(view["seconds"]),
            "  ".join(f"{k} {number(v)}" for k, v in list(view["metrics"].items())[:3]),
            view["sweep"],
            ", ".join([*view["labels"], *view["tags"]]),
            *([size(view["bytes"])] if options.size else []),
        ]
        for view in views
    ]
    has_sweeps = any(view["sweep"] for view in views)
    has_labels = any(view["labels"] or view["tags"] for view in views)
    header = ["RUN", "STATE", "CREATED (UTC)", "TIME", "METRICS", "SWEEP" if has_sweeps else ""]
    header += ["LABELS, TAGS" if has_labels else ""]
    header += ["SIZE"] if options.size else []
    print(columns(rows, header))
    return 0


def _run_size(run: RunDirectory) -> dict[str, int]:
    """Return the bytes and files of a run, with those that it shares with other runs."""
    from redco_flow.tracking.disk_usage import size_of_run

    found = size_of_run(Workspace(run.path.parents[1]), run)
    return {"bytes": found.num_bytes, "files": found.num_files}


def _marks(view: dict[str, Any]) -> str:
    """Notes on a damaged record that the run's state does not depend on, and on deleted bytes."""
    is_damaged = view["damaged"] and view["state"] != "damaged"
    return " (damaged)" * bool(is_damaged) + " (deleted)" * bool(view["deleted"])


def _find(options: argparse.Namespace, text: str) -> RunDirectory:
    return find_single_run(workspace_of(options), text)


def _status(options: argparse.Namespace) -> int:
    workspace = workspace_of(options)
    if (sweep := find_sweep(workspace, options.run)) is not None:
        if options.watch:
            return attend_sweep(sweep, options)
        view = read_sweep_view(sweep)
        print(json.dumps(view) if options.json else sweep_text(view))
        return 0
    run = _find(options, options.run)
    if options.watch:
        follow_run(run)
    view = with_aliases(run, read_checked_view(run, with_lines=True))
    view = with_fits(run, with_goodput(run, view))
    print(json.dumps(view) if options.json else status_text(view, with_parameters=True))
    return 0


def status_text(view: dict[str, Any], *, with_parameters: bool = False) -> str:
    """One run for people: its stages, then what to read or do next.

    Args:
        with_parameters: also how many parameters each training has.
    """
    lines = [f"{view['run']}: {view['state']}  {duration(view['seconds'])}".rstrip()]
    lines += [f"  launcher: {view['launcher']}"] if view["launcher"] else []
    stages = view["stages"]
    for name, stage in stages.items():
        lines.append(f"  {stage_line(name, stage)}")
        if with_parameters and stage.get("parameters"):
            lines.append(f"    {stage['parameters']}")
        lines += [f"    warning: {stage['warning']}"] if stage.get("warning") else []
        lines += [f"    profile: {stage['profile']}"] if stage["profile"] else []
        lines += [f"    {_goodput_text(stage['goodput'])}"] if stage.get("goodput") else []
        lines += [f"    {stage['fit']['text']}"] if stage.get("fit") else []
    for key in ("labels", "note"):
        text = view.get(key) or ""
        text = text if isinstance(text, str) else ", ".join(text)
        lines += [f"{key}: {text}".replace("\n", "\n    ")] if text else []
    if view.get("deleted"):
        lines.append(f"artifacts and work that no other run has, and logs: {view['deleted']}")
    # A failed run's message is its first failed stage's, which is in that stage's line, and a
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
        lines.append(
            f"  (`redco-flow ui --prefect {view['run']}` prints a link that lets a browser in)"
        )
    if view["queued"]:
        lines.append(
            f"its jobs go on without a launcher; `redco-flow resume {view['run']}` follows them."
        )
    lines += [damage for damage in view.get("damaged", ()) if damage != view["message"]]
    if view["state"] == State.INTERRUPTED:
        lines.append(f"its launcher is gone; `redco-flow resume {view['run']}` takes it up again.")
    return "\n".join(lines)


def _goodput_text(goodput: dict[str, float]) -> str:
    """Summarize the time shares of a training, the useful part first."""
    parts = {key: seconds for key, seconds in goodput.items() if key not in ("goodput", "total")}
    shown = [f"{name} {duration(seconds)}" for name, seconds in parts.items() if seconds]
    return f"goodput {goodput['goodput']:.1%} of {duration(goodput['total'])}: {', '.join(shown)}"


def _attach(options: argparse.Namespace) -> int:
    workspace = workspace_of(options)
    if (sweep := find_sweep(workspace, options.run)) is not None:
        return attend_sweep(sweep, options)
    run = _find(options, options.run)
    code = follow_run(run)
    view = read_run_view(run)
    if view["state"] not in LIVE_STATES:
        print(status_text(view))
    return code


def _logs(options: argparse.Namespace) -> int:
    text, stage = options.run, ""
    if "/" in text and not (Path(text) / "run.json").is_file():
        text, _, stage = text.rpartition("/")
    run = _find(options, text or "@last")
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
