"""What stands at the top of the page: which run, how it ended, when, how long, by which code."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from redco_flow.report.number_format import duration, moment, seconds_between
from redco_flow.report.stage_facts import StageFacts, judged_state
from redco_flow.tracking.run_directory import RunDirectory
from redco_flow.tracking.states import State

_SHORT = 12


@dataclass(frozen=True)
class Headline:
    """The page's head.

    Args:
        state: completed, failed, cancelled, running or pending.
        message: how the run ended, in words; of one that completed, the stages say it.
        facts: (name, value) pairs.
        command: as it was typed.
        prefect_url: the run's page; empty if it has none.
    """

    run: str
    name: str
    state: str
    message: str
    facts: tuple[tuple[str, str], ...]
    command: str
    prefect_url: str


def read_headline(run: RunDirectory, stages: Mapping[str, StageFacts], now: str) -> Headline:
    """Return the page's head.

    Args:
        now: the time as `utc_now` gives it: up to when a run took that has no end yet.

    Raises:
        WorkspaceError, ValueError, OSError: run.json or state.json cannot be read.
    """
    record, state = run.record, run.read_state()
    judged = judged_state(state, dict(stages))
    url = str(state.get("prefect_url") or "")
    return Headline(
        run=run.id,
        name=str(record.get("name") or run.id),
        state=judged,
        message="" if judged == State.COMPLETED else str(state.get("message") or ""),
        facts=tuple(_facts(record, state, now)),
        command=typed_command(record),
        # Anything but a web address would be a way to smuggle a script into a link.
        prefect_url=url if url.startswith(("http://", "https://")) else "",
    )


def typed_command(record: Mapping[str, Any]) -> str:
    """Return the command line as it was typed; empty where it is not known."""
    words = [str(word) for word in record.get("argv") or ()]
    if not words:
        return ""
    return shlex.join([PurePath(words[0]).name, *words[1:]])


def _facts(
    record: Mapping[str, Any], state: Mapping[str, Any], now: str
) -> Iterator[tuple[str, str]]:
    started = state.get("started_at") or record.get("created_at")
    yield "started", moment(started)
    took = duration(seconds_between(started, state.get("ended_at") or now))
    yield "took", took if state.get("ended_at") else f"{took} so far"
    yield "pipeline", str(record.get("pipeline_path") or record.get("name") or "–")
    yield "profile", str(record.get("profile") or "–")
    yield "by", f"{record.get('user') or '?'} on {record.get('host') or '?'}"
    yield "code", code_text(record.get("code") or {})


def code_text(code: Mapping[str, Any]) -> str:
    """Name a run's code: its commit, and whether it was changed since."""
    commit = str(code.get("commit") or "")[:_SHORT]
    if not commit:
        return "outside a git repository"
    if not code.get("dirty"):
        return f"commit {commit}"
    return f"commit {commit}, with changes"
