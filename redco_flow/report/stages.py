"""The table of stages: what became of each, how long it took, what it made, where its logs are."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from redco_flow.report.numbers import duration, size
from redco_flow.report.stage_facts import DAMAGED, StageFacts
from redco_flow.terminal_text import line_shown
from redco_flow.tracking.artifacts import ArtifactStore
from redco_flow.tracking.attempt import AttemptDirectory, Cause, State
from redco_flow.tracking.deletions import deletion_text, find_deletion
from redco_flow.tracking.run_directory import RunDirectory

_NOT_TO_BLAME = (None, Cause.COMPLETED, Cause.CANCELLED)


@dataclass(frozen=True)
class LogLink:
    """One log.

    Args:
        label: the file's name; of several, whose it is.
        path: relative to the page's directory; empty while there is none.
        state: of an array's task; empty for the others, whose state is the stage's.
    """

    label: str
    path: str
    state: str = ""


def log_links(run: RunDirectory, attempt: AttemptDirectory | None) -> tuple[LogLink, ...]:
    """Return the logs of an attempt, in the order of its tasks or ranks.

    Args:
        run: whose page links to them; the attempt may be another run's.
    """
    if attempt is None:
        return ()
    if tasks := attempt.tasks:
        return tuple(_of_task(run, task) for task in tasks)
    ranks = attempt.ranks_with_logs()
    paths = {rank: _link(run, attempt.log_path(rank)) for rank in ranks}
    return tuple(
        LogLink(f"rank {rank}" if len(ranks) > 1 else f"rank{rank}.log", path)
        for rank, path in paths.items()
    )


def _profile_links(run: RunDirectory, stage: StageFacts) -> tuple[LogLink, ...]:
    """Return the traces of a stage's steps, of all its attempts."""
    attempts = stage.maker.attempts if stage.maker else stage.attempts
    found = [attempt for attempt in attempts if attempt.profile_path.is_dir()]
    return tuple(LogLink("profile", _link(run, one.profile_path)) for one in found)


def to_blame(attempt: AttemptDirectory) -> AttemptDirectory:
    """Return whose files say why an attempt failed: the first task's or rank's that did."""
    failed = [task for task in attempt.tasks if _cause(task) not in _NOT_TO_BLAME]
    if attempt.tasks:
        return (failed or attempt.tasks)[0]
    return AttemptDirectory(attempt.path, _rank_of_end(attempt))


def _of_task(run: RunDirectory, task: AttemptDirectory) -> LogLink:
    log = task.log_path()
    path = _link(run, log) if log.is_file() else ""
    return LogLink(
        f"task {task.path.name}", path, _cause(task) or (State.RUNNING if path else State.WAITING)
    )


def _link(run: RunDirectory, log: Path) -> str:
    return Path(os.path.relpath(log, run.path)).as_posix()


def _cause(task: AttemptDirectory) -> Cause | None:
    """The cause of a task's end; None where no record has it."""
    try:
        return task.cause
    except DAMAGED:
        return None


def _rank_of_end(attempt: AttemptDirectory) -> int:
    try:
        record = attempt.read_exit()
        return record.rank or 0 if record is not None else 0
    except DAMAGED:
        return 0


_SHORT_ID = 12


@dataclass(frozen=True)
class ArtifactView:
    """One artifact that a stage made.

    Args:
        output: the output's name.
        step: the training step of a checkpoint; empty for everything else.
        size: its files' size; says so if they are gone.
        path: the directory of its files.
    """

    output: str
    id: str
    step: str
    size: str
    path: str

    @property
    def short_id(self) -> str:
        """Enough of the id to name it."""
        return self.id[:_SHORT_ID]


@dataclass(frozen=True)
class StageRow:
    """One stage.

    Args:
        share: its part of the run's computing time, 0 to 100.
        source: the run that computed it, if it was reused; logs and profiles are then that run's.
    """

    name: str
    kind: str
    state: str
    is_reused: bool
    source: str
    attempt: str
    took: str
    share: float
    artifacts: tuple[ArtifactView, ...]
    logs: tuple[LogLink, ...]
    profiles: tuple[LogLink, ...]
    message: str


def stage_rows(
    run: RunDirectory, stages: Iterable[StageFacts], store: ArtifactStore
) -> list[StageRow]:
    """Return a row for each stage."""
    shown = list(stages)
    total = sum(_seconds(stage) or 0.0 for stage in shown)
    return [_row(run, stage, store, total) for stage in shown]


def _row(run: RunDirectory, stage: StageFacts, store: ArtifactStore, total: float) -> StageRow:
    seconds = _seconds(stage)
    attempt = stage.last_attempt
    ended_well = stage.state == State.COMPLETED
    return StageRow(
        name=stage.name,
        kind=stage.kind,
        state=stage.state,
        is_reused=stage.is_reused,
        source=stage.maker.run.id if stage.is_reused and stage.maker else "",
        attempt=str(attempt.number) if attempt else "–",
        took=_took(stage, seconds),
        share=100.0 * (seconds or 0.0) / total if total else 0.0,
        artifacts=tuple(_artifact(store, *item) for item in stage.outputs.items()),
        logs=log_links(run, stage.maker.attempt if stage.maker else attempt),
        profiles=_profile_links(run, stage),
        message="" if ended_well else str(stage.entry.get("message") or "").partition("\n")[0],
    )


def _seconds(stage: StageFacts) -> float | None:
    seconds = stage.entry.get("seconds")
    if isinstance(seconds, int | float):
        return float(seconds)
    return None


def _took(stage: StageFacts, seconds: float | None) -> str:
    if stage.is_reused and stage.result:
        return f"{duration(stage.result.seconds)}, earlier"
    return duration(seconds)


def _artifact(store: ArtifactStore, output: str, artifact_id: str) -> ArtifactView:
    found = store.find(artifact_id)
    if found is None:
        return ArtifactView(output, artifact_id, "", "deleted", "")
    if (deletion := find_deletion(found)) is not None:
        return ArtifactView(output, artifact_id, "", deletion_text(deletion), "")
    held = size(found.num_bytes) if store.is_whole(artifact_id) else "damaged"
    step = found.metadata.get("step") if found.kind == "checkpoint" else None
    at = f"step {step:,}" if isinstance(step, int) else ""
    return ArtifactView(output, artifact_id, at, held, str(found.path))


_MAX_BYTES = 1 << 16
_MAX_CHARACTERS = 500


def last_lines(path: Path, count: int) -> list[str]:
    """Return the last lines of a log that are not empty; a missing log has none.

    Raises:
        OSError: it cannot be read.
    """
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _MAX_BYTES))
            lines = file.read().split(b"\n")
    except FileNotFoundError:
        return []
    shown = [line for line in map(_clean, lines) if line.strip()]
    return shown[-count:]


def _clean(raw: bytes) -> str:
    text = line_shown(raw)
    if len(text) > _MAX_CHARACTERS:
        return f"{text[:_MAX_CHARACTERS]}… [{len(text):,} characters]"
    return text


_NUM_LINES = 20
_TITLES: dict[str, str] = {
    Cause.FAILED: "failed",
    Cause.CANCELLED: "was cancelled",
    Cause.STALLED: "made no progress and was stopped",
    Cause.OUT_OF_MEMORY: "ran out of memory",
    Cause.LOST: "was lost",
}


@dataclass(frozen=True)
class Failure:
    """One stage that failed or was cancelled.

    Args:
        stage: its name.
        title: what became of it, in a few words.
        message: the error, in full sentences.
        traceback: where it was raised; empty where no Python error was.
        log_lines: the log's end; of several processes, that of the first that failed.
        log_path: relative to the run's directory; empty if no job was started.
        advice: what to do next.
    """

    stage: str
    title: str
    message: str
    traceback: str
    log_lines: tuple[str, ...]
    log_path: str
    advice: str


def find_failures(run: RunDirectory, stages: Iterable[StageFacts]) -> list[Failure]:
    """Return the stages that failed or were cancelled, in order."""
    return [
        _failure(run, stage) for stage in stages if stage.state in (State.FAILED, State.CANCELLED)
    ]


def _failure(run: RunDirectory, stage: StageFacts) -> Failure:
    attempt = stage.last_attempt
    said = str(stage.entry.get("message") or "")
    advice = f"redco-flow retry {run.id}"
    if attempt is None:
        title = _TITLES[stage.state]
        return Failure(stage.name, title, said or "No job was started.", "", (), "", advice)
    unreadable = []
    culprit = to_blame(attempt)
    log_path = culprit.log_path(culprit.rank)
    try:
        error = dict(culprit.read_error() or {})
        ended = attempt.read_exit()
    except DAMAGED as problem:
        error, ended = {}, None
        unreadable.append(f"Its records cannot be read: {problem}")
    try:
        lines = last_lines(log_path, _NUM_LINES)
    except OSError as problem:
        lines = []
        unreadable.append(f"Its log cannot be read: {problem}")
    cause = stage.state if ended is None else ended.cause
    raised = f"{error['type']}: {error.get('message', '')}" if error.get("type") else ""
    # The supervisor's message has the error and adds advice; without it the worker's must do.
    message = (
        (ended.message if ended is not None else "")
        or raised
        or said
        or "There is no record of why."
    )
    return Failure(
        stage=stage.name,
        title=_TITLES.get(cause, _TITLES[stage.state]),
        message="\n".join([message, *unreadable]),
        traceback=str(error.get("traceback") or ""),
        log_lines=tuple(lines),
        log_path=log_path.relative_to(run.path).as_posix(),
        advice=advice,
    )
