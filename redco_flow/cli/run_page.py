"""A run's page while it is served: the report, and its state and curves as JSON for polling."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from redco_flow.cli.listing import file_identities
from redco_flow.cli.status import stage_line
from redco_flow.cli.view import read_run_view
from redco_flow.errors import DamagedRecord
from redco_flow.records import digest_json
from redco_flow.report.log_cache import LogCache
from redco_flow.report.numbers import duration, state_mark
from redco_flow.report.page import (
    figures_of,
    overlaid_losses,
    read_histories,
    read_page,
    render_page,
    trainings_of,
)
from redco_flow.report.stage_facts import StageFacts, logging_attempts, read_stages
from redco_flow.report.system import system_sections
from redco_flow.tracking.attempt import State
from redco_flow.tracking.notes import RECORD as NOTES
from redco_flow.tracking.notes import RunNotes, read_notes
from redco_flow.tracking.process_identity import utc_now
from redco_flow.tracking.run_directory import RunDirectory
from redco_flow.tracking.workspace import Workspace

_DIGITS = 16
_RUNNING = ("running", "waiting")


def served_run_page(run: RunDirectory, workspace: Workspace, *, has_prefect: bool) -> str:
    """Return a run's report as HTML with what a served page has in addition.

    Args:
        has_prefect: whether a Prefect server runs, to which the page links.
    """
    # Before the page is read: what changes meanwhile is fetched once more.
    revision = _page_revision(run, str(read_run_view(run)["state"]))
    try:
        notes = read_notes(run)
    except DamagedRecord:  # which the page's remarks have
        notes = RunNotes()
    served = {"notes": asdict(notes), "has_prefect": has_prefect, "page": revision}
    return render_page(read_page(run, workspace, utc_now()), served)


def read_live(
    run: RunDirectory, workspace: Workspace, known_charts: str, logs: LogCache
) -> dict[str, Any]:
    """Return what changes on a run's page while it runs.

    `page` identifies everything but the charts: the browser fetches the page again when it
    changes. The charts are left out while `charts`, which identifies their files, is what the
    browser knows.

    Args:
        known_charts: `charts` of the browser's last answer; empty before the first.
        logs: of this run, kept from one call to the next.
    """
    view = read_run_view(run)
    stages = list(read_stages(run, workspace, lambda remark: None).values())
    charts = digest_json(file_identities(_chart_files(stages)))[:_DIGITS]
    lines = [
        stage_line(name, stage)
        for name, stage in view["stages"].items()
        if stage["state"] in _RUNNING
    ]
    # It is not known when a run was interrupted.
    tooks = {
        State.RUNNING: f"{duration(view['seconds'])} so far",
        State.INTERRUPTED: duration(None),
    }
    answer = {
        "state": view["state"],
        "mark": state_mark(view["state"]),
        "took": tooks.get(view["state"], ""),
        "lines": lines,
        "page": _page_revision(run, view["state"]),
        "charts": charts,
    }
    return answer if charts == known_charts else answer | _charts(run, stages, logs)


def _page_revision(run: RunDirectory, state: str) -> str:
    files = (run.state_path, run.path / NOTES, run.path / "run.json")
    return digest_json([state, *file_identities(files)])[:_DIGITS]


def _charts(run: RunDirectory, stages: Sequence[StageFacts], logs: LogCache) -> dict[str, Any]:
    """The page's charts in its order, and the facts of each training."""
    histories = read_histories(stages, logs.metrics)
    trainings = trainings_of(run, stages, histories, logs.goodput)
    system = system_sections(stages, logs.system_metrics)
    figures = figures_of(overlaid_losses(histories), trainings, system)
    return {
        "titles": [figure.title for figure in figures],
        "plots": [figure.plot for figure in figures],
        "facts": [training.facts for training in trainings],
    }


def _chart_files(stages: Sequence[StageFacts]) -> Iterator[Path]:
    for stage in stages:
        attempts = {one.path: one for one in (*stage.attempts, *logging_attempts(stage)[0])}
        for attempt in attempts.values():
            yield from (attempt.metrics_path, attempt.system_metrics_path)
