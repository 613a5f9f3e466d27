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
from redco_flow.tracking.row_counts import RowLosses, learnt_notes
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


def row_tables(stages: Iterable[StageFacts], store: ArtifactStore) -> Iterator[Table]:
    """Yield a table for each dataset that a stage made without all of its rows in full."""
    for stage in stages:
        for artifact in filter(None, map(store.find, stage.outputs.values())):
            if artifact.kind == "dataset" and "skipped_rows" in artifact.metadata:
                losses = RowLosses.of(artifact.metadata)
                if losses.groups:
                    yield _table(stage.name, losses)


def _table(stage: str, losses: RowLosses) -> Table:
    read = "" if losses.num_read is None else f". {losses.num_read:,} rows were read."
    rows = [
        [
            Cell(one.what),
            Cell(one.reason),
            *_count(one.num_rows, losses.num_read),
            Cell(one.remedy),
        ]
        for one in losses.groups
    ]
    header = ["what", "reason", "rows", "% of all", "what to do"]
    return Table(f"Rows skipped and truncated by stage {stage}{read}", header, rows)


def _count(num_rows: int, total: int | None) -> tuple[Cell, Cell]:
    """Return a number of rows and its share of a total that may be unknown, in percent."""
    share = f"{100 * num_rows / total:.1f}" if total else ""
    return Cell(f"{num_rows:,}", is_number=True), Cell(share, is_number=True)


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
class CurationSet:
    """One curation.

    Args:
        num_rows: training rows, before.
        reasons: why rows were left out; None where none were.
        examples: of rows that were left out: reason, row, and of a duplicate the other row and
            their similarity; the row's beginning; the beginning of the row that it repeats, or "".
    """

    stage: str
    num_rows: int
    num_kept: int
    reasons: Table | None
    examples: tuple[tuple[str, str, str], ...]


def curation_sets(stages: Iterable[StageFacts], store: ArtifactStore) -> Iterator[CurationSet]:
    """Yield the dropped rows of each stage that made a curation artifact."""
    for stage in stages:
        for artifact in filter(None, map(store.find, stage.outputs.values())):
            if artifact.kind == "curation":
                yield _curation(stage.name, artifact.metadata)


def _curation(stage: str, metadata: Mapping[str, Any]) -> CurationSet:
    dropped, num_rows = metadata["dropped"], int(metadata["num_rows"]["train"])
    rows = [
        [Cell(reason), *_count(count, num_rows)]
        for reason, count in sorted(dropped.items(), key=lambda item: -item[1])
    ]
    header = ["reason", "rows", "% of all"]
    reasons = Table(f"Rows dropped by stage {stage}", header, rows) if rows else None
    examples = tuple(
        (_what(one), str(one["text"]), str(one["like_text"])) for one in metadata["examples"]
    )
    return CurationSet(stage, num_rows, num_rows - sum(dropped.values()), reasons, examples)


def _what(example: Mapping[str, Any]) -> str:
    text = f"{example['reason']}: {example['row_id']}"
    if not example["like"]:
        return text
    if example["similarity"] is None:
        return f"{text}, which has words of {example['like']}"
    return f"{text}, {100 * example['similarity']:.0f}% of the shingles of {example['like']}"
