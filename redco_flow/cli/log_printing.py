"""Print what stages printed: as it stands, or until the run ends.

Lines go to standard output; whose log it is, where that is another run's, and why there is none
are said first on standard error.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

from redco_flow.cli.log_source import LogSource, find_log
from redco_flow.cli.log_view import LogFollower, last_lines
from redco_flow.cli.run_view import LIVE_STATES, read_run_view
from redco_flow.errors import UsageError
from redco_flow.tracking.run_directory import RunDirectory
from redco_flow.tracking.typed_records import unless_damaged

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
        num_last: only so many lines of each; None means all.
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
    followers = {name: LogFollower() for name in stages}
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
                lines = followers[name].new_lines(source.path, is_last=not is_live)
                _print_lines(lines, name if with_name else "")
        sys.stdout.flush()
        if is_live:
            time.sleep(_POLL_SECONDS)


def stage_names(run: RunDirectory) -> list[str]:
    """Return a run's stages; of one whose state is damaged, those that have a directory."""
    folder = run.path / "stages"
    return list(_entries(run)) or sorted(one.name for one in folder.glob("*") if one.is_dir())


def _entries(run: RunDirectory) -> dict[str, Any]:
    """The stages in state.json; none where that is damaged."""
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
