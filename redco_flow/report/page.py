"""Everything that the page shows, read piece by piece.

A piece that cannot be read is left out and a remark in the page says so: whatever is wrong with
a run's files, there is a report, and it does not fail the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from redco_flow.errors import DamagedRecord
from redco_flow.report.comparisons import Comparison, comparisons
from redco_flow.report.failures import Failure, find_failures
from redco_flow.report.headline import Headline, read_headline
from redco_flow.report.history import read_history
from redco_flow.report.lineage_view import LineageItem, lineage_items
from redco_flow.report.metrics_table import MetricsGroup, metrics_groups
from redco_flow.report.reproduction import Reproduction, read_reproduction
from redco_flow.report.samples import SampleSet, sample_sets
from redco_flow.report.stage_facts import StageFacts, logging_attempts, read_stages
from redco_flow.report.stage_table import StageRow, stage_rows
from redco_flow.report.training import Training, view_training
from redco_flow.tracking.artifacts import ArtifactStore
from redco_flow.tracking.damage import find_damaged_records
from redco_flow.tracking.run_directory import RunDirectory
from redco_flow.tracking.workspace import Workspace

_T = TypeVar("_T")
_LOSS_UNITS = {"text_to_text": "nats per target token"}


@dataclass(frozen=True)
class Page:
    """What the template is given.

    Args:
        headline: None if the run's own records cannot be read.
        remarks: what is missing and why.
        built_at: when, as an ISO time.
    """

    run: str
    headline: Headline | None
    failures: list[Failure]
    metrics: list[MetricsGroup]
    comparisons: list[Comparison]
    trainings: list[Training]
    samples: list[SampleSet]
    stages: list[StageRow]
    lineage: list[LineageItem]
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
        except Exception as error:  # noqa: BLE001 (a report that says so is better than none)
            remarks.append(f"{what} cannot be shown: {type(error).__name__}: {error}")
            return otherwise

    none: dict[str, StageFacts] = {}
    stages = attempt("The stages", lambda: read_stages(run, workspace, remarks.append), none)
    each = list(stages.values())
    none_damaged: list[DamagedRecord] = []
    damaged = attempt("The records", lambda: find_damaged_records(run), none_damaged)
    remarks += [str(one) for one in damaged]
    return Page(
        run=run.id,
        headline=attempt("The run's record", lambda: read_headline(run, stages, now), None),
        failures=attempt("What failed", lambda: find_failures(run, each), []),
        metrics=attempt("The metrics", lambda: metrics_groups(each, store), []),
        comparisons=attempt("The comparisons", lambda: comparisons(each, store), []),
        trainings=attempt("The training", lambda: _trainings(each), []),
        samples=attempt("Sample predictions", lambda: sample_sets(each, store), []),
        stages=attempt("The table of stages", lambda: stage_rows(run, each, store), []),
        lineage=attempt("The lineage", lambda: lineage_items(run, workspace, each), []),
        reproduction=attempt("How to reproduce it", lambda: read_reproduction(run, each), None),
        remarks=remarks,
        built_at=now,
    )


def _trainings(stages: Iterable[StageFacts]) -> list[Training]:
    """The stages that logged something as they went."""
    found = []
    for stage in stages:
        attempts, source = logging_attempts(stage)
        history = read_history(attempts)
        # An evaluation's own record is no training.
        if not history.logged and not history.remarks:
            continue
        unit = _LOSS_UNITS.get(stage.recipe, "")
        found.append(view_training(stage.name, history, loss_unit=unit, source=source))
    return found
