"""The verbs compare and report: several runs side by side; the page of a run or of a sweep."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from redco_flow.cli.arguments import (
    Verbs,
    add_html,
    add_json,
    add_run,
    add_workspace,
    workspace_path,
)
from redco_flow.cli.sweep import write_sweep_page
from redco_flow.cli.text import Footnotes, duration, fitted_columns, number
from redco_flow.errors import UsageError
from redco_flow.tracking.process_identity import utc_now
from redco_flow.tracking.run_directory import find_run
from redco_flow.tracking.sweep_directory import find_sweep
from redco_flow.tracking.workspace import Workspace

if TYPE_CHECKING:
    from redco_flow.report.comparison import ComparedRun

_WIDTH_OF_FILES = 120  # where the output is not a terminal


def register(verbs: Verbs) -> None:
    """Declare the verbs."""
    compare = verbs.add("compare", _compare)
    compare.add_argument("runs", nargs="+", metavar="RUN", help="run ids or their beginnings")
    add_html(compare)
    add_json(compare)
    add_workspace(compare)
    report = verbs.add("report", _report)
    add_run(report)
    add_html(report)
    add_workspace(report)


def _compare(options: argparse.Namespace) -> int:
    # Imported here: the other verbs need not wait for it.
    from redco_flow.report.comparison import comparison_page, read_compared
    from redco_flow.report.runs_page import write_page

    workspace = Workspace(workspace_path(options).absolute())
    found = {run.id: run for run in (find_run(workspace, text) for text in options.runs)}
    if len(found) < 2:
        raise UsageError("compare takes two runs or more; `redco-flow ls` lists them.")
    runs = [read_compared(run) for run in found.values()]
    if options.json:
        print(json.dumps({"runs": [_to_json(one, runs) for one in runs]}))
    else:
        print(comparison_text(runs, shutil.get_terminal_size((_WIDTH_OF_FILES, 24)).columns))
    if options.html:
        sys.stderr.write(f"page: {write_page(comparison_page(runs, utc_now()), options.html)}\n")
    return 0


def comparison_text(runs: Sequence[ComparedRun], width: int) -> str:
    """Return a table of the runs: the settings that differ, then the metrics, then footnotes.

    A line for each run where that fits, else a column for each run; where neither fits, blocks of
    columns.

    Args:
        width: of the terminal, in characters.
    """
    from redco_flow.report.comparison import differing_settings, metric_names, setting_text

    keys, names = differing_settings(runs), metric_names(runs)
    notes = Footnotes()
    marks = {name: _marks(name, runs, notes) for name in names}
    rows = [
        [
            one.label,
            one.state,
            duration(one.seconds),
            *(setting_text(one, key) for key in keys),
            *(f"{number(one.metrics.get(name))}{marks[name].get(one.label, '')}" for name in names),
        ]
        for one in runs
    ]
    table = [["RUN", "STATE", "TIME", *keys, *names], *rows]
    transposed = [list(column) for column in zip(*table, strict=True)]
    texts = [fitted_columns(one[1:], one[0], width) for one in (table, transposed)]
    return "\n".join([min(texts, key=lambda text: text.count("\n\n")), *notes.lines()])


def _marks(name: str, runs: Sequence[ComparedRun], notes: Footnotes) -> dict[str, str]:
    """The footnotes of a metric's values that cannot be compared with the first run's, by run."""
    from redco_flow.report.comparison import not_compared

    reasons = not_compared(name, runs).items()
    return {label: f" {notes.mark(f'{name}: {why}')}" for label, why in reasons}


def _to_json(run: ComparedRun, runs: Sequence[ComparedRun]) -> dict[str, object]:
    from redco_flow.report.comparison import differing_settings, not_compared

    return {
        "run": run.run.id,
        "state": run.state,
        "created_at": run.created_at,
        "seconds": run.seconds,
        "settings": {key: run.settings.get(key) for key in differing_settings(runs)},
        "metrics": dict(run.metrics),
        "not_compared": {
            name: why[run.label]
            for name in run.metrics
            if run.label in (why := not_compared(name, runs))
        },
    }


def _report(options: argparse.Namespace) -> int:
    # Imported here: the other verbs need not wait for it.
    from redco_flow.report.page import build_report

    workspace = Workspace(workspace_path(options).absolute())
    target: Path | None = options.html
    sweep = None if options.run == "@last" else find_sweep(workspace, options.run)
    if sweep is not None:
        print(write_sweep_page(sweep, workspace, target))
    else:
        print(build_report(find_run(workspace, options.run), workspace, path=target))
    return 0
