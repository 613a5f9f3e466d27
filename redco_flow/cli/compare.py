"""The verbs diff, compare and history: runs side by side; report: the page of a run or a sweep."""

from __future__ import annotations

import argparse
import difflib
import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from redco_flow.cli.arguments import (
    Verbs,
    add_html,
    add_json,
    add_run,
    add_workspace,
    positive,
    workspace_of,
)
from redco_flow.cli.text import page_text
from redco_flow.errors import UsageError
from redco_flow.tracking.process_identity import utc_now
from redco_flow.tracking.run_directory import (
    RunDirectory,
    list_damaged,
    list_runs,
)
from redco_flow.tracking.run_metrics import is_of_training, require_metric
from redco_flow.tracking.sweep_directory import find_single_run, find_sweep
from redco_flow.tracking.workspace import Workspace

if TYPE_CHECKING:
    from redco_flow.report.compared_run import ComparedRun
    from redco_flow.report.history import HistoryEntry
    from redco_flow.report.runs_page import RunsPage

_WIDTH_OF_FILES = 120  # where the output is not a terminal
_MAX_METRICS = 3


def register(verbs: Verbs) -> None:
    """Declare the verbs."""
    diff = verbs.add("diff", _diff)
    diff.add_argument("first", metavar="RUN", help="earlier run: id, its beginning or path")
    diff.add_argument(
        "second", nargs="?", default="@last", metavar="RUN", help="later run (default: last)"
    )
    diff.add_argument(
        "--resamples",
        type=int,
        default=10_000,
        metavar="N",
        help="bootstrap draws for the intervals (10000); 0: no intervals",
    )
    diff.add_argument("--all", action="store_true", help="print every change and the whole patch")
    compare = verbs.add("compare", _compare)
    compare.add_argument("runs", nargs="+", metavar="RUN", help="run ids or their beginnings")
    history = verbs.add("history", _history)
    history.add_argument("pipeline", metavar="PIPELINE", help="name or file of the pipeline")
    history.add_argument(
        "--metric", action="append", default=[], metavar="NAME", help="metric (the first three)"
    )
    history.add_argument(
        "-n", "--last", type=positive, default=20, metavar="N", help="number of runs (20)"
    )
    for verb in (diff, compare, history):
        add_html(verb)
        add_json(verb)
        add_workspace(verb)
    report = verbs.add("report", _report)
    add_run(report)
    add_html(report)
    add_workspace(report)


def _show(
    options: argparse.Namespace, page: Callable[[], RunsPage], record: Callable[[], Any]
) -> int:
    """Print the page's tables or the record as JSON, and write the page where `--html` names."""
    from redco_flow.report.runs_page import write_page

    made = page() if options.html or not options.json else None
    if options.json:
        print(json.dumps(record()))
    elif made is not None:
        width = shutil.get_terminal_size((_WIDTH_OF_FILES, 24)).columns
        print(page_text(made, width, is_whole=getattr(options, "all", True)))
    if options.html and made is not None:
        sys.stderr.write(f"page: {write_page(made, options.html)}\n")
    return 0


def _diff(options: argparse.Namespace) -> int:
    # Imported here, as below: the other verbs need not wait for it.
    from redco_flow.report.comparison import diff_page
    from redco_flow.report.run_diff.measures import Resampling
    from redco_flow.report.run_diff.runs import diff_runs

    if options.resamples < 0:
        raise UsageError(f"--resamples {options.resamples}: 0 or more.")
    workspace = workspace_of(options)
    first, second = (find_single_run(workspace, text) for text in (options.first, options.second))
    found = diff_runs(first, second, Resampling(options.resamples))
    return _show(
        options, lambda: diff_page(found, utc_now(), with_curves=bool(options.html)), found.to_json
    )


def _compare(options: argparse.Namespace) -> int:
    from redco_flow.report.compared_run import ComparedRun
    from redco_flow.report.comparison import comparison_page

    workspace = workspace_of(options)
    found = {run.id: run for run in (find_single_run(workspace, text) for text in options.runs)}
    if len(found) < 2:
        raise UsageError("compare takes two runs or more; `redco-flow ls` lists them.")
    runs = [ComparedRun(run) for run in found.values()]
    return _show(
        options,
        lambda: comparison_page(runs, utc_now(), with_curves=bool(options.html)),
        lambda: {"runs": [_to_json(one, runs) for one in runs]},
    )


def _to_json(run: ComparedRun, runs: Sequence[ComparedRun]) -> dict[str, object]:
    from redco_flow.report.compared_run import not_compared
    from redco_flow.report.comparison import differing_settings

    reasons = {name: not_compared(name, runs).get(run.label) for name in run.metrics}
    return {
        "run": run.run.id,
        "state": run.state,
        "created_at": run.created_at,
        "seconds": run.seconds,
        "settings": {key: run.settings.get(key) for key in differing_settings(runs)},
        "metrics": dict(run.metrics),
        "not_compared": {name: why for name, why in reasons.items() if why},
    }


def _history(options: argparse.Namespace) -> int:
    from redco_flow.cli.view import read_run_view
    from redco_flow.report.compared_run import ComparedRun
    from redco_flow.report.history import history_page, promotions, read_entries

    workspace = workspace_of(options)
    name = _pipeline_name(options.pipeline)
    runs = _runs_of(workspace, name)
    num_last = max(0, options.last)
    # One run more, for the differences of the first one.
    read = [ComparedRun(run, view=read_run_view(run)) for run in runs[-num_last - 1 :]]
    entries = read_entries(read, num_last=num_last)
    shown = _shown_metrics(entries, options.metric)

    def page() -> RunsPage:
        promoted = promotions(workspace, entries)
        return history_page(name, entries, shown, promoted, utc_now(), len(runs) - len(entries))

    listed = [entry.to_json() for entry in entries]
    return _show(options, page, lambda: {"pipeline": name, "num_runs": len(runs), "runs": listed})


def _pipeline_name(text: str) -> str:
    """Return the pipeline's name; of a file, the one that it contains."""
    if os.sep not in text and not text.endswith((".yaml", ".yml")):
        return text
    # Imported here: it brings pydantic, and most callers give the name.
    from redco_flow.spec.find import find_file
    from redco_flow.spec.yaml import read_yaml

    path = find_file("pipelines", text)
    document = read_yaml(path.read_text(encoding="utf-8"), str(path))
    return str(document.get(("name",), path.stem))


def _runs_of(workspace: Workspace, name: str) -> list[RunDirectory]:
    """Return a pipeline's runs, oldest first, without those that have no record left."""
    listed = list_runs(workspace)
    runs = listed[: len(listed) - len(list_damaged(listed))][::-1]
    found = [run for run in runs if _pipeline_of(run) == name]
    if found:
        return found
    known = list(dict.fromkeys(map(_pipeline_of, reversed(runs))))
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.3)
    some = list(dict.fromkeys([*near, *known]))[:10]
    hint = f"; there are runs of {', '.join(some)}" if some else ""
    raise UsageError(f"no run of a pipeline {name!r} in {workspace.root}{hint}.")


def _pipeline_of(run: RunDirectory) -> str:
    """A run's id is `<pipeline>-<shortid>`."""
    return run.id.rpartition("-")[0]


def _shown_metrics(entries: Sequence[HistoryEntry], requested: Sequence[str]) -> list[str]:
    """Return the requested metrics; without a request the first ones, evaluations' before others.

    Raises:
        UsageError: no run has one of these.
    """
    known = dict.fromkeys(key for entry in reversed(entries) for key in entry.metrics)
    for name in requested:
        require_metric(name, known, "the runs shown")
    return list(requested) or sorted(known, key=is_of_training)[:_MAX_METRICS]


def _report(options: argparse.Namespace) -> int:
    from redco_flow.cli.sweep_view import write_sweep_page
    from redco_flow.report.page import build_report

    workspace = workspace_of(options)
    target: Path | None = options.html
    if (sweep := find_sweep(workspace, options.run)) is not None:
        print(write_sweep_page(sweep, target))
    else:
        print(build_report(find_single_run(workspace, options.run), workspace, path=target))
    return 0
