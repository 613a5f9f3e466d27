"""Why a stage did not end well: its error, how its job ended, the last lines of its log."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from redco_flow.report.log_tail import last_lines
from redco_flow.report.stage_facts import DAMAGED, StageFacts
from redco_flow.report.stage_logs import to_blame
from redco_flow.tracking.run_directory import RunDirectory
from redco_flow.tracking.states import Cause, State

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
