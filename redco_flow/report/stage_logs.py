"""The logs of the attempt that counts: one for each of its processes, or of its array's tasks."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from redco_flow.report.stage_facts import DAMAGED
from redco_flow.tracking.attempt import AttemptDirectory
from redco_flow.tracking.run_directory import RunDirectory
from redco_flow.tracking.states import Cause, State

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
    """Why a task ended; None while nothing says so."""
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
