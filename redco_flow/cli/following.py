"""Follow a run until it ends: a live table on a terminal, quiet lines elsewhere.

Only reads files, so it may be interrupted at any moment: the run goes on.
"""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING, Any, TextIO

from redco_flow.cli.run_view import LIVE_STATES, read_run_view
from redco_flow.cli.text import duration, number, short_id
from redco_flow.terminal_text import plain, visible
from redco_flow.tracking.lease import find_holder
from redco_flow.tracking.run_directory import RunDirectory
from redco_flow.tracking.states import State

if TYPE_CHECKING:
    from rich.table import Table

DETACHED_EXIT_CODE = 130
INTERRUPTED_EXIT_CODE = 1
_POLL_SECONDS = 0.1
_SECONDS_TO_WRITE_REPORT = 20.0
_SECONDS_BETWEEN_PROGRESS_LINES = 10.0
_CHANGING = (State.RUNNING, State.WAITING)
_MARKS = {
    State.COMPLETED: "✓", State.FAILED: "✗", State.CANCELLED: "■", State.RUNNING: "●",
    State.WAITING: "…", State.PENDING: " ", State.SKIPPED: "-",
}  # fmt: skip
_COLOURS = {
    State.COMPLETED: "green",
    State.FAILED: "red",
    State.CANCELLED: "yellow",
    State.RUNNING: "cyan",
}


def follow_run(run: RunDirectory, *, stream: TextIO | None = None) -> int:
    """Show the run on `stream` (standard error) until it ends.

    Returns:
        The run's exit code; 130 after Ctrl-C, which detaches and leaves the run alone.
    """
    out = stream or sys.stderr
    try:
        view = _follow_live(run) if _is_terminal(out) else _follow_quietly(run, out)
    except KeyboardInterrupt:
        out.write(
            f"\ndetached; {run.id} goes on. `redco-flow attach {run.id}` comes back, "
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
    parts = [str(progress.get("phase") or "")]
    if progress.get("step") is not None:
        total = progress.get("total_steps")
        parts.append(f"step {progress['step']}" + (f"/{total}" if total else ""))
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
            " on ".join(filter(None, [duration(stage["seconds"]), stage["devices"]])),
            escape(visible(_stage_detail(stage))),
        )
    return table


def phase_text(view: dict[str, Any]) -> str:
    """What the launcher is at while no stage has begun; empty once one has."""
    if view["state"] not in LIVE_STATES:
        return ""
    return str(view["message"]) or (
        "starting the launcher" if view["state"] == State.PENDING else ""
    )


def stage_line(name: str, stage: dict[str, Any]) -> str:
    """One stage as one quiet line."""
    state = "reused" if stage["reused"] else stage["state"]
    took = f" in {duration(stage['seconds'])}" if stage["seconds"] and not stage["reused"] else ""
    took += f" on {stage['devices']}" if stage["devices"] else ""
    detail = _stage_detail(stage)
    return f"{name}: {state}{took}" + (f"  {detail}" if detail else "")


def _stage_detail(stage: dict[str, Any]) -> str:
    if stage["state"] == State.RUNNING:
        return stage["message"] or progress_text(stage["progress"])
    if stage["state"] == State.COMPLETED:
        made = [f"{key} {short_id(id)}" for key, id in stage["artifacts"].items()]
        return "  ".join([*made, *([stage["message"]] if stage["message"] else [])])
    return str(stage["message"]).partition("\n")[0]


def _is_terminal(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def _follow_live(run: RunDirectory) -> dict[str, Any]:
    from rich.console import Console
    from rich.live import Live

    view = read_run_view(run)
    console = Console(file=plain(sys.stderr))
    with Live(render_table(view), console=console, refresh_per_second=4) as live:
        while view["state"] in LIVE_STATES:
            time.sleep(_POLL_SECONDS)
            view = read_run_view(run)
            live.update(render_table(view))
    return view


def _follow_quietly(run: RunDirectory, out: TextIO) -> dict[str, Any]:
    said: dict[str, tuple[str, int | None]] = {}
    last_line: dict[str, str] = {}
    phase = ""
    next_progress = time.monotonic() + _SECONDS_BETWEEN_PROGRESS_LINES
    while True:
        view = read_run_view(run)
        is_due = time.monotonic() >= next_progress
        # A run that is taken up again is pending until its launcher has read how it ended before.
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
        time.sleep(_POLL_SECONDS)
