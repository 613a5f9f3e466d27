"""Print the logs of stages: as they are now, or until the run ends.

Lines go to standard output. Notes go to standard error first: the run that made a reused stage, or
why there is no log.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from redco_flow.cli.view import LIVE_STATES, read_run_view
from redco_flow.errors import UsageError
from redco_flow.orchestrate.run.attempt_files import LogTail, clean_line
from redco_flow.tracking.attempt import AttemptDirectory
from redco_flow.tracking.deletions import deletion_text, find_run_deletion
from redco_flow.tracking.run_directory import RunDirectory
from redco_flow.tracking.typed_records import unless_damaged

if TYPE_CHECKING:
    from redco_flow.tracking.maker import Maker

_MAX_LINE_BYTES = 1 << 16


def log_of(attempt: AttemptDirectory, rank: int | None) -> Path:
    """Return the path of a rank's log, or a task's; None means the first that the attempt has."""
    if rank is None:  # an array that is tried again has only the tasks that are not done
        rank = int(attempt.tasks[0].path.name) if attempt.tasks else 0
    return attempt.log_path(rank)


def last_lines(path: Path, count: int | None = None) -> list[str]:
    """The log's lines, or its last `count`; a missing log has none."""
    try:
        with path.open("rb") as file:
            return list(deque(map(clean_line, _bounded_lines(file)), maxlen=count))
    except FileNotFoundError:
        return []


def _bounded_lines(file: BinaryIO) -> Iterator[bytes]:
    """Lines in bounded memory: what a line has beyond its first 64 KiB is passed over."""
    while line := file.readline(_MAX_LINE_BYTES):
        rest = line
        while rest and not rest.endswith(b"\n"):
            rest = file.readline(_MAX_LINE_BYTES)
        yield line.rstrip(b"\n")


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
    # Imported here: who follows a run reads no logs, and lineage takes its time.
    from redco_flow.tracking.maker import find_maker

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
    if (deletion := find_run_deletion(run)) is not None:
        message = deletion_text(deletion)
    return LogSource(attempt, path, f"{stage}: {about}" + (f" ({message})" if message else ""))


def _about(maker: Maker, path: Path) -> str:
    """Describe the attempt: its run, its state and its files."""
    made = f"made by run {maker.run.id}, stage {maker.stage}, attempt {maker.number}"
    if path.is_file():
        return f"{made}; this is its log."
    if not maker.run.path.is_dir():
        return f"{made}; {maker.run.path} is gone, and the log with it."
    if (deletion := find_run_deletion(maker.run)) is not None:
        return f"{made}; its log was {deletion_text(deletion)}."
    return f"{made}; there is no log in {maker.attempt.path}."


_POLL_SECONDS = 0.25


def print_logs(
    run: RunDirectory,
    stages: Sequence[str],
    *,
    rank: int | None,
    num_last: int | None,
    with_name: bool,
) -> None:
    """Print the stages' logs as they are.

    Args:
        rank: of which process, or task; None means each stage's first.
        num_last: at most this many lines of each; None means all.
        with_name: begin each line with its stage.

    Raises:
        UsageError: no stage has a log of that rank; lists those that have.
    """
    sources = _find_logs(run, stages, rank)
    _check_rank(run, list(sources.values()), rank)
    for name, source in sources.items():
        _say(source.remark)
        if source.path is not None:
            _print_lines(last_lines(source.path, num_last), name if with_name else "")


def follow_logs(
    run: RunDirectory, stages: Sequence[str], *, rank: int | None, with_name: bool
) -> None:
    """Print the stages' logs as they grow, until the run ends; arguments as of `print_logs`."""
    tails: dict[str, LogTail] = {}
    said: dict[str, str] = {}
    is_live = True
    while is_live:
        # The state is read first: what a stage printed before it ended is then all there.
        is_live = read_run_view(run)["state"] in LIVE_STATES
        for name, source in _find_logs(run, stages, rank).items():
            if (source.is_there or not is_live) and said.get(name, "") != source.remark:
                said[name] = source.remark
                _say(source.remark)
            if source.path is not None:
                if name not in tails or tails[name].path != source.path:
                    tails[name] = LogTail(source.path)  # of the first, or of another attempt
                lines = tails[name].new_lines() if is_live else tails[name].last_lines()
                _print_lines(lines, name if with_name else "")
        sys.stdout.flush()
        if is_live:
            time.sleep(_POLL_SECONDS)


def stage_names(run: RunDirectory) -> list[str]:
    """Return a run's stages; of one whose state is damaged, those that have a directory."""
    folder = run.path / "stages"
    return list(_entries(run)) or sorted(one.name for one in folder.glob("*") if one.is_dir())


def _entries(run: RunDirectory) -> dict[str, Any]:
    entries: dict[str, Any] = (unless_damaged(run.read_state) or {}).get("stages", {})
    return entries


def _find_logs(run: RunDirectory, stages: Sequence[str], rank: int | None) -> dict[str, LogSource]:
    entries = _entries(run)
    return {name: find_log(run, name, entries.get(name, {}), rank) for name in stages}


def _check_rank(run: RunDirectory, sources: Sequence[LogSource], rank: int | None) -> None:
    """Refuse a rank that none of the stages has, once they have any."""
    attempts = [source.attempt for source in sources if source.attempt is not None]
    ranks = sorted({one for attempt in attempts for one in attempt.ranks_with_logs()})
    if rank is not None and ranks and rank not in ranks:
        listed = ", ".join(map(str, ranks))
        raise UsageError(f"{run.id}: no process of rank {rank} has a log; those of {listed} have.")


def _print_lines(lines: Sequence[str], name: str) -> None:
    for line in lines:
        print(f"{name} | {line}" if name else line)


def _say(remark: str) -> None:
    """Say it between the lines that were and are to be printed."""
    if remark:
        sys.stdout.flush()
        sys.stderr.write(f"{remark}\n")
        sys.stderr.flush()
