"""Where the log of a run's stage stands: in the run, or in another one that made its result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redco_flow.cli.log_view import log_of
from redco_flow.tracking.attempt import AttemptDirectory
from redco_flow.tracking.maker import Maker, find_maker
from redco_flow.tracking.run_directory import RunDirectory


@dataclass(frozen=True)
class LogSource:
    """A stage's log.

    Args:
        attempt: that wrote it; None where there is none.
        path: of the log; None without an attempt.
        remark: what one should know first: whose log it is if not the run's own, or why there is
            none; empty where there is nothing to say.
    """

    attempt: AttemptDirectory | None
    path: Path | None
    remark: str

    @property
    def is_there(self) -> bool:
        """Whether there is a log to read."""
        return self.path is not None and self.path.is_file()


def find_log(
    run: RunDirectory, stage: str, entry: Mapping[str, Any], rank: int | None
) -> LogSource:
    """Return the log of what made, or is to make, a stage's result.

    Args:
        entry: the stage's, in the run's state.json.
        rank: which process's, or task's; None means the first that there is.
    """
    maker = find_maker(run, stage, entry)
    if maker is not None:
        made_at = log_of(maker.attempt, rank)
        return LogSource(maker.attempt, made_at, f"{stage}: {_about(maker, made_at)}")
    if entry.get("reused"):
        message = entry.get("message") or "no record names the run that made it"
        return LogSource(None, None, f"{stage}: reused, {message}; its log cannot be found.")
    attempt = run.latest_attempt(stage)
    path = log_of(attempt, rank) if attempt is not None else None
    if path is not None and path.is_file():
        return LogSource(attempt, path, "")
    about = f"{entry.get('state', 'pending')}, no log" + (f" of rank {rank}" if rank else "")
    message = str(entry.get("message") or "").partition("\n")[0]
    return LogSource(attempt, path, f"{stage}: {about}" + (f" ({message})" if message else ""))


def _about(maker: Maker, path: Path) -> str:
    """Whose attempt it was, and what is there of it."""
    made = f"made by run {maker.run.id}, stage {maker.stage}, attempt {maker.number}"
    if path.is_file():
        return f"{made}; this is its log."
    if not maker.run.path.is_dir():
        return f"{made}; {maker.run.path} is gone, and the log with it."
    return f"{made}; there is no log in {maker.attempt.path}."
