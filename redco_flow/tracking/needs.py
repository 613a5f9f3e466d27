"""Find what of a workspace is needed, and by which run, alias, schedule or sweep."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from redco_flow.errors import UsageError
from redco_flow.records import list_directory
from redco_flow.tracking.aliases import AliasStore
from redco_flow.tracking.artifacts import ArtifactStore
from redco_flow.tracking.attempt import AttemptDirectory, State
from redco_flow.tracking.deletions import find_run_deletion
from redco_flow.tracking.evaluations import evaluations_of
from redco_flow.tracking.locks import find_holder
from redco_flow.tracking.process_identity import ProcessIdentity
from redco_flow.tracking.results import StageResult, latest_result, list_results
from redco_flow.tracking.run_directory import RunDirectory, list_runs
from redco_flow.tracking.schedules import FiringState, ScheduleDirectory, list_schedules
from redco_flow.tracking.sweep_directory import SweepDirectory, current_attempt
from redco_flow.tracking.workspace import SHORT_DIGITS, Workspace

_ID = re.compile(r"(?<![0-9a-zA-Z])[0-9a-f]{12,64}(?![0-9a-zA-Z])")
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_NAME = re.compile(r"^name:\s*[\"']?([A-Za-z0-9_.-]+)", re.MULTILINE)


@dataclass
class Needs:
    """The needed artifacts, work directories and files of a workspace.

    Args:
        runs: references of all runs but `deleted`.
        deleted: of runs whose bytes were deleted: they need nothing.
        held: runs that are not released by their age: id to the reason.
        named: artifacts that aliases and schedules need: id to which.
        folders: names of those with rows that a `redco-flow predict` reads or may read later.
    """

    workspace: Workspace
    runs: list[RunReferences]
    deleted: list[RunReferences]
    held: dict[str, str]
    named: dict[str, str]
    folders: set[str] = field(default_factory=set)
    _results: dict[str, StageResult] = field(default_factory=dict)
    _makers: dict[str, set[str]] = field(default_factory=dict)
    _used: dict[str, set[str]] = field(default_factory=dict)
    _work: set[str] = field(default_factory=set)
    _open: set[str] = field(default_factory=set)
    _ranks: dict[str, int] = field(default_factory=dict)

    def release(self, released: Collection[RunReferences]) -> None:
        """Collect what all runs but these need."""
        self._used, self._work, self._open, self.folders = {}, set(), set(), set()
        ids = {one.run.id for one in released}
        for one in (one for one in self.runs if one.run.id not in ids):
            for artifact_id in (*self.outputs_of(one), *one.pinned):
                self._used.setdefault(artifact_id, set()).add(one.run.id)
            if not one.is_completed:
                self._open.add(one.run.id)
                self._work |= {fingerprint[:SHORT_DIGITS] for fingerprint in one.fingerprints}
                self.folders.add(Path(one.run.record.get("pipeline_path", "")).parent.name)

    def outputs_of(self, one: RunReferences) -> frozenset[str]:
        """Return the artifacts of a run; of an open one, those too that it is about to reuse."""
        results = (self._results.get(it[:SHORT_DIGITS]) for it in one.fingerprints)
        found = (it.outputs.values() for it in results if it and not one.is_completed)
        return one.artifacts.union(*found)

    def fingerprints_of(self, artifact_id: str) -> frozenset[str]:
        """Return the results that have an artifact."""
        if not self._makers:
            for one in self._results.values():
                for output in one.outputs.values():
                    self._makers.setdefault(output, set()).add(one.fingerprint)
        return frozenset(self._makers.get(artifact_id, ()))

    def why(self, artifact_id: str) -> str:
        """Return who needs an artifact; empty where it is not needed."""
        runs = sorted(self._used.get(artifact_id, ()))
        return self.named.get(artifact_id) or (f"run {runs[0]}" if runs else "")

    def is_used(self, artifact_id: str, *, but_by: Collection[str]) -> bool:
        """Say whether another run has an artifact."""
        others = (one for one in self.runs if one.run.id not in but_by)
        return any(artifact_id in one.artifacts for one in others)

    def needs_work(self, name: str, holder: str) -> bool:
        """Say whether a work directory is needed: its result is still to be computed.

        Args:
            holder: the run whose worker was the last in it.
        """
        if name not in self._work and holder not in self._open:
            return False
        result, store = self._results.get(name), ArtifactStore(self.workspace)
        return result is None or not all(map(store.is_whole, result.outputs.values()))

    def rank(self, one: RunReferences) -> int:
        """Return how many completed runs of the pipeline are newer; a sweep counts once."""
        if not self._ranks:
            newest: dict[str, dict[str, int]] = {}
            for other in (one for one in self.runs if one.has_ended):  # newest first
                units = newest.setdefault(other.run.record["name"], {})
                unit = other.run.record.get("sweep") or other.run.id
                self._ranks[other.run.id] = units.setdefault(unit, len(units))
        return self._ranks[one.run.id]


def find_needs(workspace: Workspace, chosen: Collection[str] = ()) -> Needs:
    """Read all records of a workspace; call `release` before asking for anything.

    Args:
        chosen: runs to be deleted, whose state does not hold them.

    Raises:
        DamagedRecord: a record of a run, alias, schedule or sweep is damaged.
    """
    list_directory(workspace.runs)  # NFS then asks its server for runs that begin now
    runs = [read_references(one) for one in list_runs(workspace)]
    is_gone = {one.run.id: not one.is_live and bool(find_run_deletion(one.run)) for one in runs}
    present = [one for one in runs if not is_gone[one.run.id]]
    deleted = [one for one in runs if is_gone[one.run.id]]
    open_runs = (one.run.id for one in present if not one.has_ended)
    held = {run: "it can be resumed" for run in open_runs if run not in chosen}
    held |= {one.run.id: "a process drives it" for one in present if one.is_live}
    held |= dict(_held_by_sweeps(workspace, runs, chosen, is_gone))
    named = dict(_named_by_aliases(workspace))
    for schedule in list_schedules(workspace):
        held |= _held_by_schedule(schedule)
        named |= dict(_named_by_schedule(workspace, schedule, runs))
    results = {one.fingerprint[:SHORT_DIGITS]: one for one in list_results(workspace)}
    return Needs(workspace, present, deleted, held, named, _results=results)


def _named_by_aliases(workspace: Workspace) -> Iterator[tuple[str, str]]:
    """The checkpoint of each alias and the one before, for a rollback, with their evaluations."""
    for alias in AliasStore(workspace).all():
        for checkpoint in filter(None, (alias.checkpoint, alias.previous)):
            yield checkpoint, str(alias.name)
            for evaluation in evaluations_of(workspace, checkpoint):
                yield evaluation.id, str(alias.name)


def _named_by_schedule(
    workspace: Workspace, schedule: ScheduleDirectory, runs: Iterable[RunReferences]
) -> Iterator[tuple[str, str]]:
    """Artifacts that the pipeline names by id or run, and its latest results, for reuse."""
    asked = schedule.read()
    path = Path(asked.directory, asked.pipeline)
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UsageError(
            f"{path} of schedule {schedule.name} cannot be read ({error.strerror}), so it is not "
            f"known which artifacts it needs. Make it readable, or delete the schedule: "
            f"`redco-flow schedule rm {schedule.name}`. Nothing was changed."
        ) from error
    written = "\n".join([text, *asked.overrides])
    ids, words = _ID.findall(written), set(_WORD.findall(written))
    of_runs = {it for one in runs if one.run.id in words for it in one.artifacts | one.pinned}
    for artifact in ArtifactStore(workspace).list() if ids or of_runs else ():
        is_of_run = artifact.kind == "checkpoint" and artifact.id in of_runs
        if is_of_run or any(artifact.id.startswith(one) for one in ids):
            yield artifact.id, f"schedule {schedule.name}"
    names = {one.run.rpartition("-")[0] for one in schedule.firings() if one.run}
    for name in names.union(_NAME.findall(text)[:1]):
        for pointer in (workspace.results / "latest" / name).glob("*.json"):
            latest = latest_result(workspace, name, pointer.stem)
            for artifact_id in latest.outputs.values() if latest else ():
                yield artifact_id, f"schedule {schedule.name}"


def _held_by_schedule(schedule: ScheduleDirectory) -> dict[str, str]:
    """The last good run, by which the next firing knows what is new."""
    good = [one.run for one in schedule.firings() if one.state == FiringState.COMPLETED and one.run]
    return dict.fromkeys(good[-1:], f"it is the last good one of schedule {schedule.name}")


def _held_by_sweeps(
    workspace: Workspace,
    runs: Iterable[RunReferences],
    chosen: Collection[str],
    is_gone: dict[str, bool],
) -> Iterator[tuple[str, str]]:
    """All runs of sweeps of which a point is not completed."""
    completed = {one.run.id for one in runs if one.has_ended or is_gone[one.run.id]}
    for path in sorted((workspace.root / "sweeps").glob("*/sweep.json")):
        sweep = SweepDirectory(path.parent)
        points = {point.run for point in sweep.points}
        present = {run for run in points if is_gone.get(run) is False}
        is_live = find_holder(RunDirectory(sweep.path)) is not None
        is_completed = points <= completed and not sweep.num_open
        if is_live or not (is_completed or present <= set(chosen)):
            for run in present:
                yield run, f"sweep {sweep.id} is not completed"


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
    pinned = run.read_pinned_artifacts()
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
