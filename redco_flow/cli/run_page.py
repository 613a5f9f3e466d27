"""A run's page while it is served: the report, and its state and curves as JSON for polling."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from redco_flow.cli.status import stage_line
from redco_flow.cli.view import read_run_view
from redco_flow.errors import DamagedRecord
from redco_flow.records import digest_json
from redco_flow.report.charts import Figure
from redco_flow.report.page import read_overlaid, read_page, read_trainings, render_page
from redco_flow.report.stage_facts import StageFacts, logging_attempts, read_stages
from redco_flow.report.system import system_sections
from redco_flow.report.training import TrainingSection
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


def read_live(run: RunDirectory, workspace: Workspace, known_charts: str) -> dict[str, Any]:
    """Return what changes on a run's page while it runs.

    `page` identifies everything but the charts: the browser fetches the page again when it
    changes. The charts are left out while `charts`, which identifies their files, is what the
    browser knows.

    Args:
        known_charts: `charts` of the browser's last answer; empty before the first.
    """
    view = read_run_view(run)
    stages = list(read_stages(run, workspace, lambda remark: None).values())
    charts = digest_json(_identities(_chart_files(stages)))[:_DIGITS]
    lines = [
        stage_line(name, stage)
        for name, stage in view["stages"].items()
        if stage["state"] in _RUNNING
    ]
    answer = {
        "state": view["state"],
        "message": view["message"] if view["state"] != "completed" else "",
        "started_at": _started_at(run),
        "lines": lines,
        "page": _page_revision(run, view["state"]),
        "charts": charts,
    }
    return answer if charts == known_charts else answer | _charts(run, stages)


def _page_revision(run: RunDirectory, state: str) -> str:
    files = (run.state_path, run.path / NOTES, run.path / "run.json")
    return digest_json([state, *_identities(files)])[:_DIGITS]


def _charts(run: RunDirectory, stages: Sequence[StageFacts]) -> dict[str, Any]:
    """The page's charts in its order, and the facts of each training."""
    trainings = read_trainings(run, stages)
    figures = list(_figures(stages, trainings))
    return {
        "titles": [figure.title for figure in figures],
        "plots": [figure.plot for figure in figures],
        "facts": [training.facts for training in trainings],
    }


def _figures(
    stages: Sequence[StageFacts], trainings: Sequence[TrainingSection]
) -> Iterator[Figure]:
    yield from read_overlaid(stages)
    for training in trainings:
        yield from training.figures
    for section in system_sections(stages):
        yield from section.figures


def _chart_files(stages: Sequence[StageFacts]) -> Iterator[Path]:
    for stage in stages:
        attempts = {one.path: one for one in (*stage.attempts, *logging_attempts(stage)[0])}
        for attempt in attempts.values():
            yield from (attempt.metrics_path, attempt.system_metrics_path)


def _started_at(run: RunDirectory) -> str | None:
    try:
        state = run.read_state()
    except DamagedRecord:
        return None
    return None if state.get("ended_at") else state.get("started_at")


def _identities(paths: Iterable[Path]) -> list[list[int]]:
    """The time of change, size and inode of each file; zeros where it does not exist."""
    found = []
    for path in paths:
        try:
            status = os.stat(path)
        except OSError:
            found.append([0, 0, 0])
        else:
            found.append([status.st_mtime_ns, status.st_size, status.st_ino])
    return found
