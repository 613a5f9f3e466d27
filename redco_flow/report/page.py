"""Read the parts of a run's page one by one, and write it as HTML.

A part that cannot be read is left out, with a remark in the page: damaged files of a run change the
report, but neither prevent it nor fail the run.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any, TypeVar

from redco_flow.errors import DamagedRecord
from redco_flow.records import write_text
from redco_flow.report.charts import Figure
from redco_flow.report.metrics import (
    Confusion,
    MetricsGroup,
    comparisons,
    confusions,
    metrics_groups,
)
from redco_flow.report.numbers import duration, moment, seconds_between
from redco_flow.report.rendering import render
from redco_flow.report.run_time import SystemSection, TimeShare, system_sections, time_shares
from redco_flow.report.runs_page import Table
from redco_flow.report.samples import SampleSet, sample_sets
from redco_flow.report.stage_facts import StageFacts, judged_state, logging_attempts, read_stages
from redco_flow.report.stage_graph import LineageItem, StageGraph, lineage_items, stage_graph
from redco_flow.report.stage_notes import (
    CurationSet,
    Environment,
    LearntSet,
    curation_sets,
    learnt_sets,
    read_environment,
    row_tables,
)
from redco_flow.report.stages import Failure, StageRow, find_failures, stage_rows
from redco_flow.report.training import TrainingSection, Units, overlay_trainings, view_training
from redco_flow.report.training_history import History, Record, read_history
from redco_flow.tracking.artifacts import ArtifactStore
from redco_flow.tracking.attempt import AttemptDirectory, State
from redco_flow.tracking.damage import find_damaged_records
from redco_flow.tracking.goodput import TimeParts, find_goodput
from redco_flow.tracking.planned_fits import compare_fits
from redco_flow.tracking.process_identity import Clock, utc_now
from redco_flow.tracking.run_directory import RunDirectory
from redco_flow.tracking.typed_records import unless_damaged
from redco_flow.tracking.workspace import Workspace

_SHORT = 12


@dataclass(frozen=True)
class Headline:
    """The page's head.

    Args:
        state: completed, failed, cancelled, running or pending.
        message: how the run ended, in words; empty of one that completed.
        facts: (name, value) pairs.
        command: as it was typed.
        prefect_url: the run's page; empty if it has none.
    """

    run: str
    name: str
    state: str
    message: str
    facts: tuple[tuple[str, str], ...]
    command: str
    prefect_url: str


def read_headline(run: RunDirectory, stages: Mapping[str, StageFacts], now: str) -> Headline:
    """Return the page's head.

    Args:
        now: the time as `utc_now` gives it: up to when a run took that has no end yet.

    Raises:
        WorkspaceError, ValueError, OSError: run.json or state.json cannot be read.
    """
    record, state = run.record, run.read_state()
    judged = judged_state(state, dict(stages))
    url = str(state.get("prefect_url") or "")
    return Headline(
        run=run.id,
        name=str(record.get("name") or run.id),
        state=judged,
        message="" if judged == State.COMPLETED else str(state.get("message") or ""),
        facts=tuple(_facts(record, state, now)),
        command=typed_command(record),
        # Anything but a web address would be a way to smuggle a script into a link.
        prefect_url=url if url.startswith(("http://", "https://")) else "",
    )


def typed_command(record: Mapping[str, Any]) -> str:
    """Return the command line as it was typed; empty where it is not known."""
    words = [str(word) for word in record.get("argv") or ()]
    if not words:
        return ""
    return shlex.join([PurePath(words[0]).name, *words[1:]])


def _facts(
    record: Mapping[str, Any], state: Mapping[str, Any], now: str
) -> Iterator[tuple[str, str]]:
    started = state.get("started_at") or record.get("created_at")
    yield "started", moment(started)
    took = duration(seconds_between(started, state.get("ended_at") or now))
    yield "took", took if state.get("ended_at") else f"{took} so far"
    yield "pipeline", str(record.get("pipeline_path") or record.get("name") or "–")
    yield "profile", str(record.get("profile") or "–")
    yield "by", f"{record.get('user') or '?'} on {record.get('host') or '?'}"
    yield "code", code_text(record.get("code") or {})


def code_text(code: Mapping[str, Any]) -> str:
    """Name a run's code: its commit, and whether it was changed since."""
    commit = str(code.get("commit") or "")[:_SHORT]
    if not commit:
        return "outside a git repository"
    if not code.get("dirty"):
        return f"commit {commit}"
    return f"commit {commit}, with changes"


_MAX_DOCUMENT = 200_000


@dataclass(frozen=True)
class Reproduction:
    """Commands that reproduce the result.

    Args:
        commands: to be typed in this order.
        typed: the command line of this run.
        document: resolved.yaml, whole.
    """

    commands: tuple[str, ...]
    typed: str
    document: str


def read_reproduction(run: RunDirectory) -> Reproduction:
    """Return how to reproduce a run.

    Raises:
        WorkspaceError, ValueError, OSError: the run's records cannot be read.
    """
    return Reproduction(
        commands=tuple(_commands(run)),
        typed=typed_command(run.record),
        document=_document(run),
    )


def _commands(run: RunDirectory) -> Iterator[str]:
    record = run.record
    code = record.get("code") or {}
    if code.get("commit"):
        yield f"git checkout {code['commit']}"
    if code.get("dirty") and run.patch_path.is_file():
        yield shlex.join(["git", "apply", str(run.patch_path)])
    words = ["redco-flow", "run", str(run.resolved_path)]
    if record.get("profile"):
        words += ["--profile", str(record["profile"])]
    # All other overrides are in resolved.yaml already.
    given = [str(one) for one in record.get("overrides") or ()]
    yield shlex.join([*words, *(one for one in given if one.lstrip("~").startswith("profile."))])


def _document(run: RunDirectory) -> str:
    if not run.resolved_path.is_file():
        return ""
    text = run.resolved_path.read_text(encoding="utf-8", errors="replace")
    if len(text) > _MAX_DOCUMENT:
        return f"{text[:_MAX_DOCUMENT]}\n… the rest is in {run.resolved_path}"
    return text


_T = TypeVar("_T")
_LOSS_UNITS = {
    "text_to_text": "nats per target token",
    "classification": "nats per text",
    "regression": "squared error per text",
    "language_modeling": "nats per token",
    "chat": "nats per learnt token",
    "image_to_text": "nats per token",
    "image_classification": "nats per image",
    "text_to_image": "squared error per image",
}
# What the weights of a recipe's loss count; those of a recipe of the user's are examples mostly.
_COUNTED = {
    "": "tokens",
    "text_to_text": "tokens",
    "language_modeling": "tokens",
    "chat": "tokens",
    "image_to_text": "tokens",
    "classification": "texts",
    "regression": "texts",
    "image_classification": "images",
    "text_to_image": "images",
}


@dataclass(frozen=True)
class Page:
    """The variables of the template.

    Args:
        headline: None if the run's own records cannot be read.
        remarks: what is missing and why.
        built_at: when, as an ISO time.
    """

    run: str
    headline: Headline | None
    failures: list[Failure]
    metrics: list[MetricsGroup]
    confusions: list[Confusion]
    comparisons: dict[str, Table]
    times: list[TimeShare]
    overlaid: list[Figure]
    trainings: list[TrainingSection]
    system: list[SystemSection]
    rows: list[Table]
    curated: list[CurationSet]
    learnt: list[LearntSet]
    samples: list[SampleSet]
    stages: list[StageRow]
    graph: StageGraph | None
    lineage: list[LineageItem]
    environment: Environment | None
    reproduction: Reproduction | None
    remarks: list[str] = field(default_factory=list)
    built_at: str = ""


def read_page(run: RunDirectory, workspace: Workspace, now: str) -> Page:
    """Return everything that the run's page shows; never raises for what is in the files.

    Args:
        now: the time as `utc_now` gives it.
    """
    remarks: list[str] = []
    store = ArtifactStore(workspace)

    def attempt(what: str, read: Callable[[], _T], otherwise: _T) -> _T:
        try:
            return read()
        except Exception as error:  # noqa: BLE001 (a report with the error is better than none)
            remarks.append(f"{what} cannot be shown: {type(error).__name__}: {error}")
            return otherwise

    none: dict[str, StageFacts] = {}
    stages = attempt("The stages", lambda: read_stages(run, workspace, remarks.append), none)
    each = list(stages.values())
    none_logged: dict[str, History] = {}
    histories = attempt("What was logged", lambda: read_histories(each), none_logged)
    none_damaged: list[DamagedRecord] = []
    damaged = attempt("The records", lambda: find_damaged_records(run), none_damaged)
    remarks += [str(one) for one in damaged]
    return Page(
        run=run.id,
        headline=attempt("The run's record", lambda: read_headline(run, stages, now), None),
        failures=attempt("What failed", lambda: find_failures(run, each), []),
        metrics=attempt("The metrics", lambda: metrics_groups(each, store), []),
        confusions=attempt("The confusions", lambda: confusions(each, store), []),
        comparisons=attempt("The comparisons", lambda: comparisons(each, store), {}),
        times=attempt("The run's time", lambda: time_shares(run, each, now), []),
        overlaid=attempt("Losses of all trainings", lambda: overlaid_losses(histories), []),
        trainings=attempt("The training", lambda: trainings_of(run, each, histories), []),
        system=attempt("What the jobs used", lambda: system_sections(each), []),
        rows=attempt("Skipped rows", lambda: list(row_tables(each, store)), []),
        curated=attempt("What was left out", lambda: list(curation_sets(each, store)), []),
        learnt=attempt("What is learnt", lambda: learnt_sets(each, store), []),
        samples=attempt("Sample predictions", lambda: sample_sets(each, store), []),
        stages=attempt("The table of stages", lambda: stage_rows(run, each, store), []),
        graph=attempt("The graph of stages", lambda: stage_graph(each), None),
        environment=attempt("What it ran on", lambda: read_environment(each), None),
        lineage=attempt("The lineage", lambda: lineage_items(run, workspace, each), []),
        reproduction=attempt("How to reproduce it", lambda: read_reproduction(run), None),
        remarks=remarks,
        built_at=now,
    )


def read_histories(
    stages: Iterable[StageFacts],
    read: Callable[[AttemptDirectory], Iterable[Record]] = AttemptDirectory.read_metrics,
) -> dict[str, History]:
    """Return what each stage logged as it went; empty histories of those that logged nothing.

    Args:
        read: as of `read_history`.
    """
    return {stage.name: read_history(logging_attempts(stage)[0], read) for stage in stages}


def overlaid_losses(histories: Mapping[str, History]) -> list[Figure]:
    """Return the chart of the losses of all trainings, where there are several."""
    return list(overlay_trainings({name: one for name, one in histories.items() if one.logged}))


def trainings_of(
    run: RunDirectory,
    stages: Iterable[StageFacts],
    histories: Mapping[str, History],
    goodput_of: Callable[[RunDirectory, str], TimeParts | None] = find_goodput,
) -> list[TrainingSection]:
    """Return what the page shows of each stage that logged something as it went."""
    found = []
    fits = compare_fits(run)
    for stage in stages:
        attempts, source = logging_attempts(stage)
        history = histories[stage.name]
        # An evaluation's own record is no training.
        if not history.logged and not history.remarks:
            continue
        units = Units(_LOSS_UNITS.get(stage.recipe, ""), _COUNTED.get(stage.recipe, "examples"))
        progress = unless_damaged(attempts[-1].read_progress) if attempts else None
        section = view_training(
            stage.name,
            history,
            units,
            source=source,
            goodput=goodput_of(run, stage.name) if stage.attempts else None,
            parameters=str((progress or {}).get("parameters") or ""),
            warning=str((progress or {}).get("warning") or ""),
            fit=fits.get(stage.name),
        )
        found.append(section)
    return found


def figures_of(
    overlaid: Iterable[Figure],
    trainings: Iterable[TrainingSection],
    system: Iterable[SystemSection],
) -> list[Figure]:
    """Return a page's charts in its order."""
    of_trainings = (figure for one in trainings for figure in one.figures)
    return [*overlaid, *of_trainings, *(figure for one in system for figure in one.figures)]


def build_report(
    run: RunDirectory, workspace: Workspace, *, path: Path | None = None, clock: Clock = utc_now
) -> Path:
    """Render the run's report.html again and return its path; may be called at any time.

    The page names files of the run that are missing or damaged.

    Args:
        run: the run, in whatever state.
        workspace: where its artifacts and results are.
        path: where to; its links to logs work from the run's directory alone.
        clock: the time of day, for people.

    Raises:
        OSError: the page cannot be written: the disk is full or read-only; names the path.
    """
    written = path or run.report_path
    write_text(written, render_page(read_page(run, workspace, clock())))
    return written


def render_page(page: Page, served: Mapping[str, Any] | None = None) -> str:
    """Return the page as HTML; every text of the user's is escaped.

    Args:
        served: as of `rendering.render`: the run's notes, and whether a Prefect server runs.
    """
    drawn = figures_of(page.overlaid, page.trainings, page.system)
    has_charts = served is not None or bool(drawn)
    return render("page.html.jinja", page.run, served, page=page, has_charts=has_charts)
