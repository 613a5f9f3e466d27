"""Environment of a run's stages: hosts, devices, memory, and the versions of packages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from redco_flow.report.numbers import size
from redco_flow.report.runs_page import Cell, Table
from redco_flow.report.stage_facts import StageFacts
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
