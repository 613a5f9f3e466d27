"""What a person means by `rouge2`, `@last/train` or `3f9a`: a metric, a stage or an artifact.

Only finds it; `lineage.py` follows it back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from redco_flow.errors import UsageError
from redco_flow.tracking.artifacts import Artifact, ArtifactStore
from redco_flow.tracking.results import StageResult, read_result
from redco_flow.tracking.run_directory import RunDirectory, find_run
from redco_flow.tracking.states import State
from redco_flow.tracking.typed_records import unless_damaged
from redco_flow.tracking.workspace import Workspace


@dataclass(frozen=True)
class ResultTarget:
    """A stage's result in a run, or one output or metric of it.

    Args:
        result: of the stage.
        output: an output's name; empty for none in particular.
        metric: a metric's name; empty for none in particular.
    """

    result: StageResult
    output: str = ""
    metric: str = ""


Target = Artifact | ResultTarget


def find_target(workspace: Workspace, text: str) -> Target:
    """Return what `text` names.

    Raises:
        UsageError: none or several things fit; lists the candidates.
    """
    if "/" in text:
        run_text, _, rest = text.partition("/")
        return _in_run(workspace, find_run(workspace, run_text), rest)
    artifacts = ArtifactStore(workspace)
    if artifacts.is_prefix(text):
        return artifacts.get(text)
    try:
        run = find_run(workspace, "@last")
    except UsageError as error:
        raise UsageError(f"{text!r} is no artifact, and there are {error}") from error
    return _in_run(workspace, run, text)


def run_results(workspace: Workspace, run: RunDirectory) -> dict[str, StageResult]:
    """Return each finished stage's result in a run, reused ones too."""
    entries = run.read_state().get("stages") or {}
    found = {name: stage_result(workspace, run, name, entry) for name, entry in entries.items()}
    return {name: result for name, result in found.items() if result is not None}


def stage_result(
    workspace: Workspace, run: RunDirectory, stage: str, entry: Mapping[str, Any]
) -> StageResult | None:
    """Return the published result that a run's stage has, computed by the run or reused.

    Args:
        entry: the stage's, in the run's state.json.
    """
    if entry.get("state") == State.COMPLETED and entry.get("fingerprint"):
        return read_result(workspace, entry["fingerprint"])
    attempt = run.latest_attempt(stage)
    record = unless_damaged(attempt.read_result) if attempt else None
    if record is not None:
        return read_result(workspace, record.get("fingerprint", ""))
    outputs = dict(entry.get("artifacts") or {})
    # A reused stage has no attempt here: the plan or its artifacts name the computation.
    plan = unless_damaged(run.read_plan) or {}
    planned = plan.get("stages", plan).get(stage)
    if outputs and isinstance(planned, dict) and planned.get("fingerprint"):
        return read_result(workspace, str(planned["fingerprint"]))
    for artifact_id in outputs.values():
        artifact = ArtifactStore(workspace).find(artifact_id)
        if artifact is not None:
            return read_result(workspace, str(artifact.produced_by.get("fingerprint", "")))
    return None


def _in_run(workspace: Workspace, run: RunDirectory, rest: str) -> Target:
    """STAGE, STAGE/OUTPUT, STAGE/METRIC or METRIC in one run."""
    results = run_results(workspace, run)
    if rest in results:
        return ResultTarget(results[rest])
    stage, _, inner = rest.partition("/")
    if inner and stage in results:
        return _in_stage(run, results[stage], inner)
    measured = {name: one for name, one in results.items() if rest in (one.metrics or {})}
    # A training's own evaluations have the same names; the metrics artifact is what counts.
    scored = {name: one for name, one in measured.items() if "metrics" in one.outputs}
    fitting = scored or measured
    if len(fitting) == 1:
        return ResultTarget(next(iter(fitting.values())), metric=rest)
    if fitting:
        listed = ", ".join(f"{run.id}/{name}/{rest}" for name in fitting)
        raise UsageError(f"run {run.id} has {len(fitting)} metrics {rest!r}; name one: {listed}.")
    metrics = dict.fromkeys(key for one in results.values() for key in one.metrics or {})
    raise UsageError(
        f"run {run.id} has no finished stage and no metric {rest!r}. Stages: "
        f"{', '.join(results) or 'none'}. Metrics: {', '.join(metrics) or 'none'}. Artifacts are "
        f"named by their id: `redco-flow artifacts` lists them."
    )


def _in_stage(run: RunDirectory, result: StageResult, name: str) -> ResultTarget:
    """An output by its name or its selector alone, or a metric."""
    if name in (result.metrics or {}):
        return ResultTarget(result, metric=name)
    outputs = [key for key in result.outputs if name in (key, key.partition("/")[2])]
    metrics = ", ".join(result.metrics or {}) or "none"
    if len(outputs) == 1:
        return ResultTarget(result, output=outputs[0])
    raise UsageError(
        f"stage {run.id}/{result.stage} has no output and no metric {name!r}. Outputs: "
        f"{', '.join(result.outputs) or 'none'}. Metrics: {metrics}."
    )
