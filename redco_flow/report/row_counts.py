"""The table of rows that are not in a run's datasets, or not in full: how many, why, what to do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from redco_flow.report.stage_facts import StageFacts
from redco_flow.tracking.artifacts import ArtifactStore
from redco_flow.tracking.row_counts import RowGroup, RowLosses


@dataclass(frozen=True)
class RowTable:
    """One dataset's.

    Args:
        num_read: rows of the data, as text; empty of a dataset of an earlier version.
        groups: with each one's share of the rows in %; empty where that is not known.
    """

    stage: str
    num_read: str
    groups: tuple[tuple[RowGroup, str], ...]


def row_tables(stages: Iterable[StageFacts], store: ArtifactStore) -> Iterator[RowTable]:
    """Yield a table for each dataset that a stage made without all of its rows in full."""
    for stage in stages:
        for artifact in filter(None, map(store.find, stage.outputs.values())):
            if artifact.kind == "dataset" and "skipped_rows" in artifact.metadata:
                losses = RowLosses.of(artifact.metadata)
                if losses.groups:
                    yield _table(stage.name, losses)


def _table(stage: str, losses: RowLosses) -> RowTable:
    num_read = losses.num_read
    groups = tuple(
        (one, f"{100 * one.num_rows / num_read:.1f}" if num_read else "") for one in losses.groups
    )
    return RowTable(stage, "" if num_read is None else f"{num_read:,}", groups)
