"""Notes on stages for a run's page: rows lost, dropped by curation or not learnt; environment.

Read from the artifacts' manifests and the attempts' records.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from redco_flow.report.numbers import size
from redco_flow.report.runs_page import Cell, Table
from redco_flow.report.stage_facts import StageFacts
from redco_flow.tracking.artifacts import ArtifactStore
from redco_flow.tracking.row_counts import RowGroup, RowLosses, learnt_notes
from redco_flow.tracking.typed_records import unless_damaged


@dataclass(frozen=True)
class Environment:
    """Hosts, devices and packages of the stages.

    Args:
        stages: a row for each.
        versions: (package, version) that the results were computed with.
    """

    stages: Table
    versions: tuple[tuple[str, str], ...]


def read_environment(stages: Iterable[StageFacts]) -> Environment | None:
    """Return what the stages ran on; None where nothing is known yet."""
    known = [stage for stage in stages if stage.result or stage.attempts]
    if not known:
        return None
    header = ["stage", "executor", "host", "devices", "memory of host", "memory per device"]
    rows = [list(_row(stage)) for stage in known]
    versions = dict(item for one in known if one.result for item in one.result.versions.items())
    caption = "What the stages ran on; memory is the most that a process had in use"
    return Environment(Table(caption, header, rows), tuple(sorted(versions.items())))


def _row(stage: StageFacts) -> Iterator[Cell]:
    attempt = stage.maker.attempt if stage.maker else stage.last_attempt
    job = (unless_damaged(attempt.read_job) if attempt else None) or {}
    progress = (unless_damaged(attempt.read_progress) if attempt else None) or {}
    ended = unless_damaged(attempt.read_exit) if attempt else None
    host = (stage.result.host if stage.result else "") or (ended.host if ended else "")
    yield Cell(stage.name)
    yield Cell(str(job.get("executor") or "–"))
    yield Cell(host or "–")
    yield Cell(str(progress.get("devices") or "–"))
    yield _memory(ended.peak_memory_bytes if ended else None)
    yield _memory(progress.get("peak_memory_bytes"))


def _memory(num_bytes: int | None) -> Cell:
    return Cell(size(num_bytes) if num_bytes else "–", is_number=True)


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


@dataclass(frozen=True)
class LearntSet:
    """The trained parts of one dataset.

    Args:
        notes: (split, shares and warnings).
        examples: each in pieces, and whether each piece is trained on.
    """

    stage: str
    notes: tuple[tuple[str, str], ...]
    examples: tuple[tuple[tuple[str, bool], ...], ...]


def learnt_sets(stages: Iterable[StageFacts], store: ArtifactStore) -> list[LearntSet]:
    """Return the trained parts of each dataset of conversations that a stage made."""
    found = []
    for stage in stages:
        for artifact in filter(None, map(store.find, stage.outputs.values())):
            if artifact.kind == "dataset" and "learnt" in artifact.metadata:
                splits = artifact.metadata["splits"].items()
                notes = [(name, note) for name, counts in splits for note in learnt_notes(counts)]
                examples = tuple(
                    tuple((str(text), bool(is_learnt)) for text, is_learnt in pieces)
                    for pieces in artifact.metadata["learnt"]
                )
                found.append(LearntSet(stage.name, tuple(notes), examples))
    return found


@dataclass(frozen=True)
class DroppedText:
    """One row that was left out.

    Args:
        what: reason, row, and of a duplicate the other row and their similarity.
        text, like_text: beginnings; the second of the row that it repeats, if it does.
    """

    what: str
    text: str
    like_text: str


@dataclass(frozen=True)
class CurationSet:
    """One curation.

    Args:
        num_rows: training rows, before.
        reasons: (reason, rows left out for it, their share in %).
    """

    stage: str
    num_rows: int
    num_kept: int
    reasons: tuple[tuple[str, int, str], ...]
    examples: tuple[DroppedText, ...]


def curation_sets(stages: Iterable[StageFacts], store: ArtifactStore) -> Iterator[CurationSet]:
    """Yield the dropped rows of each stage that made a curation artifact."""
    for stage in stages:
        for artifact in filter(None, map(store.find, stage.outputs.values())):
            if artifact.kind == "curation":
                yield _curation(stage.name, artifact.metadata)


def _curation(stage: str, metadata: Mapping[str, Any]) -> CurationSet:
    dropped, num_rows = metadata["dropped"], int(metadata["num_rows"]["train"])
    reasons = tuple(
        (str(reason), int(count), f"{100 * count / num_rows:.1f}")
        for reason, count in sorted(dropped.items(), key=lambda item: -item[1])
    )
    examples = tuple(
        DroppedText(_what(one), str(one["text"]), str(one["like_text"]))
        for one in metadata["examples"]
    )
    return CurationSet(stage, num_rows, num_rows - sum(dropped.values()), reasons, examples)


def _what(example: Mapping[str, Any]) -> str:
    text = f"{example['reason']}: {example['row_id']}"
    if not example["like"]:
        return text
    if example["similarity"] is None:
        return f"{text}, which has words of {example['like']}"
    return f"{text}, {100 * example['similarity']:.0f}% of the shingles of {example['like']}"
