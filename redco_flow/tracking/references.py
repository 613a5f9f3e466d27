"""Read which artifacts, fingerprints and pinned checkpoints the records of a run refer to."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from redco_flow.tracking.attempt import AttemptDirectory, State
from redco_flow.tracking.locks import find_holder
from redco_flow.tracking.process_identity import ProcessIdentity
from redco_flow.tracking.run_directory import RunDirectory
from redco_flow.tracking.sweep_directory import current_attempt

_WHOLE_ID = re.compile(r"(?<![0-9a-f])[0-9a-f]{64}(?![0-9a-f])")


@dataclass(frozen=True)
class RunReferences:
    """References of one run.

    Args:
        is_live: another process drives it.
        is_completed: all of it is done, and no process drives it.
        has_ended: it is completed, or its sweep has stopped it early: its age may release it.
        artifacts: ids of what its stages made or reuse.
        fingerprints: of its stages, as far as they are known.
        pinned: ids of artifacts that its pipeline names, also by an alias, and of attempts' inputs.
    """

    run: RunDirectory
    is_live: bool
    is_completed: bool
    has_ended: bool
    artifacts: frozenset[str]
    fingerprints: frozenset[str]
    pinned: frozenset[str]


def read_references(run: RunDirectory) -> RunReferences:
    """Return what a run's records refer to.

    Raises:
        DamagedRecord: a record is damaged, so that it is not known what the run refers to.
    """
    lease = find_holder(run)
    is_live = lease is not None and lease.holder != ProcessIdentity.current()
    state, plan = run.read_state(), run.read_plan()
    stages: Mapping[str, Mapping[str, Any]] = state["stages"]
    planned: Mapping[str, Mapping[str, Any]] = plan.get("stages", plan)
    is_completed = state["state"] == State.COMPLETED and not is_live
    is_stopped = state["state"] == State.STOPPED_EARLY and not is_live
    artifacts = {
        one for entry in stages.values() for one in (entry.get("artifacts") or {}).values()
    }
    fingerprints = {
        str(entry["fingerprint"])
        for entry in (*planned.values(), *stages.values())
        if entry.get("fingerprint")
    }
    pinned = _pinned(run)
    for attempt in () if is_completed else _attempts(run, {**planned, **stages}):
        call, result = attempt.read_call() or {}, attempt.read_result() or {}
        inputs = (one for slot in call.get("inputs", {}).values() for one in slot)
        pinned |= {one["id"] for one in inputs if one.get("id")}
        artifacts |= set(result.get("outputs", {}).values())
        fingerprints |= {call.get("fingerprint", ""), result.get("fingerprint", "")} - {""}
    ids = map(frozenset, (artifacts, fingerprints, pinned))
    return RunReferences(run, is_live, is_completed, is_completed or is_stopped, *ids)


def _attempts(run: RunDirectory, stages: Mapping[str, Any]) -> Iterator[AttemptDirectory]:
    """All attempts of a run's stages, and those of other runs that make what it waits for."""
    for stage in stages:
        yield from run.attempts(stage)
        current = current_attempt(run, stage)
        if current is not None and not current.path.is_relative_to(run.path):
            yield current


def _pinned(run: RunDirectory) -> set[str]:
    try:
        return set(_WHOLE_ID.findall(run.resolved_path.read_text(encoding="utf-8")))
    except FileNotFoundError:  # the run is just being made
        return set()
