"""Validate a run's records, and list the corrupt ones with the reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NotRequired, TypedDict

from redco_flow.errors import DamagedRecord
from redco_flow.tracking.attempt import AttemptDirectory
from redco_flow.tracking.journal import read_journal
from redco_flow.tracking.locks import find_holder
from redco_flow.tracking.notes import read_notes
from redco_flow.tracking.planned_fits import read_fits
from redco_flow.tracking.run_directory import RunDirectory
from redco_flow.tracking.sweep_directory import read_shared_attempt
from redco_flow.tracking.typed_records import find_record


class LaunchFile(TypedDict):
    """launch.json, as far as every version of it goes."""

    workspace: str
    directory: str
    variables: NotRequired[dict[str, str]]  # those of earlier versions have search_path
    profile: dict[str, Any]


def find_damaged_records(run: RunDirectory, *, with_lines: bool = True) -> list[DamagedRecord]:
    """Return what is wrong with each damaged record of a run, its attempts' included.

    Args:
        with_lines: also read what has a line for each event or step, which may be long.
    """
    return [damage for read in _readers(run, with_lines=with_lines) if (damage := _damage(read))]


def _readers(run: RunDirectory, *, with_lines: bool) -> Iterator[Callable[[], object]]:
    yield lambda: run.record
    yield run.read_state
    yield run.read_plan
    yield run.read_origins
    yield lambda: read_fits(run)
    yield lambda: read_notes(run)
    yield lambda: find_holder(run)
    yield lambda: find_record(run.path / "launch.json", LaunchFile)
    if with_lines:
        yield lambda: _read_through(read_journal(run.journal_path))
    folder = run.path / "stages"
    for stage in sorted(path.name for path in folder.glob("*") if path.is_dir()):
        yield lambda stage=stage: read_shared_attempt(run, stage)  # type: ignore[misc]
        for attempt in run.attempts(stage):
            for one in (attempt, *attempt.tasks):
                yield from _readers_of_attempt(one, with_lines=with_lines)


def _readers_of_attempt(
    attempt: AttemptDirectory, *, with_lines: bool
) -> Iterator[Callable[[], object]]:
    yield from (attempt.read_call, attempt.read_job, attempt.read_exit)
    ranks = [int(path.name) for path in attempt.path.glob("ranks/*") if path.name.isdecimal()]
    for rank in sorted({0, *ranks}):
        own = AttemptDirectory(attempt.path, rank)
        yield from (own.read_progress, own.read_error, own.read_result)
    if with_lines:
        yield lambda: _read_through(attempt.read_metrics())
        yield lambda: _read_through(attempt.read_system_metrics())


def _read_through(records: Iterator[Any]) -> None:
    for _ in records:
        pass


def _damage(read: Callable[[], object]) -> DamagedRecord | None:
    try:
        read()
    except DamagedRecord as damage:
        return damage
    return None
