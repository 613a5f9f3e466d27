"""Per-stage data of a run, read once for every part of the page.

Reads state.json, the published results and the attempts' small records.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from redco_flow.tracking.attempt import ENDED_STAGE_STATES, AttemptDirectory, State
from redco_flow.tracking.lineage import run_results
from redco_flow.tracking.maker import Maker, find_maker
from redco_flow.tracking.results import StageResult
from redco_flow.tracking.run_directory import RunDirectory
from redco_flow.tracking.workspace import Workspace

# Errors of reading a record that another program has written, or that is incomplete.
DAMAGED = (ValueError, OSError, TypeError, AttributeError, KeyError)


@dataclass(frozen=True)
class StageFacts:
    """One stage of a run.

    Args:
        name: in the pipeline.
        entry: its entry in state.json.
        attempts: of this run, first to last; those of a reused stage made no result.
        result: its result, computed by this run or by an earlier one.
        maker: the attempt that made the result, where that is another run's.
    """

    name: str
    entry: dict[str, Any] = field(default_factory=dict)
    attempts: tuple[AttemptDirectory, ...] = ()
    result: StageResult | None = None
    maker: Maker | None = None

    @property
    def state(self) -> str:
        """One of the words of state.json."""
        return str(self.entry.get("state") or State.PENDING)

    @property
    def is_reused(self) -> bool:
        """Whether an earlier run computed it."""
        return bool(self.entry.get("reused"))

    @property
    def outputs(self) -> dict[str, str]:
        """Artifact id by output name."""
        return dict(self.entry.get("artifacts") or (self.result.outputs if self.result else {}))

    @property
    def metrics(self) -> dict[str, float]:
        """Its metrics; none until it has completed."""
        if self.result and self.result.metrics:
            return dict(self.result.metrics)
        return dict(self.entry.get("metrics") or {})

    @property
    def last_attempt(self) -> AttemptDirectory | None:
        """Its last attempt in this run."""
        return self.attempts[-1] if self.attempts else None

    @property
    def kind(self) -> str:
        """Its kind; empty before it was submitted."""
        return self.result.kind if self.result else str(self._call.get("kind") or "")

    @property
    def recipe(self) -> str:
        """Its recipe; empty where it has none, and before it was submitted."""
        if self.result:
            return str(self.result.ingredients.get("settings", {}).get("recipe") or "")
        return str((self._call.get("config") or {}).get("recipe") or "")

    @cached_property
    def _call(self) -> dict[str, Any]:
        try:
            return dict((self.last_attempt and self.last_attempt.read_call()) or {})
        except DAMAGED:
            return {}


def read_stages(
    run: RunDirectory, workspace: Workspace, remark: Callable[[str], None]
) -> dict[str, StageFacts]:
    """Return every stage of a run, in the pipeline's order.

    Args:
        remark: called with a message for each record that cannot be read.
    """
    try:
        entries: dict[str, Any] = dict(run.read_state().get("stages") or {})
        planned = dict(run.read_plan().get("stages") or {})
    except DAMAGED as error:
        remark(f"The run's state cannot be read: {error}")
        entries, planned = {}, {}
    try:
        results = run_results(workspace, run)
    except DAMAGED as error:
        remark(f"The stages' results cannot be read: {error}")
        results = {}
    return {
        name: StageFacts(
            name=name,
            entry=dict(entries.get(name) or {}),
            attempts=_attempts(run, name),
            result=results.get(name),
            maker=_maker(run, name, dict(entries.get(name) or {})),
        )
        for name in dict.fromkeys((*entries, *planned))
    }


def logging_attempts(stage: StageFacts) -> tuple[tuple[AttemptDirectory, ...], str]:
    """Return the attempts that logged for a stage, and the run they are of if not of this one."""
    of_maker = stage.maker.attempts if stage.maker is not None else ()
    logged = tuple(one for one in of_maker if one.metrics_path.is_file())
    if stage.maker is None or not (logged or not stage.attempts):
        return stage.attempts, ""
    return logged, stage.maker.run.id


def judged_state(state: dict[str, Any], stages: dict[str, StageFacts]) -> str:
    """Return the run's state; its stages' where they have all ended but the run's is not written.

    The page is made while the run is being closed.
    """
    said = str(state.get("state") or State.PENDING)
    ends = {stage.state for stage in stages.values()}
    if said != State.RUNNING or not ends or not ends.issubset(ENDED_STAGE_STATES):
        return said
    worst = (State.FAILED, State.CANCELLED, State.STOPPED_EARLY)
    return next((end for end in worst if end in ends), State.COMPLETED)


def _attempts(run: RunDirectory, stage: str) -> tuple[AttemptDirectory, ...]:
    try:
        return tuple(run.attempts(stage))
    except (ValueError, OSError):  # something lies there that is no attempt
        return ()


def _maker(run: RunDirectory, stage: str, entry: dict[str, Any]) -> Maker | None:
    try:
        return find_maker(run, stage, entry)
    except DAMAGED:
        return None
