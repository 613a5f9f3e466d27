"""Trace a result back to the data files' digests, or an artifact forward to its results.

Reads published results and manifests, and of a run only what names its stages' results.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from redco_flow.errors import UsageError
from redco_flow.local_paths import expanded, is_file
from redco_flow.records import digest_file
from redco_flow.tracking.aliases import AliasStore, artifact_id_of, is_alias
from redco_flow.tracking.artifacts import Artifact, ArtifactStore
from redco_flow.tracking.attempt import State
from redco_flow.tracking.deletions import deletion_text, find_deletion
from redco_flow.tracking.lineage_nodes import (
    AliasNode,
    ConfigLeaf,
    ImpactNode,
    LineageNode,
    Production,
    data_node,
)
from redco_flow.tracking.results import StageResult, list_results, read_result
from redco_flow.tracking.run_directory import RunDirectory, find_run, list_runs
from redco_flow.tracking.run_metrics import locate_metrics
from redco_flow.tracking.typed_records import unless_damaged
from redco_flow.tracking.workspace import Workspace

_DIGEST_PREFIX = re.compile(r"[0-9a-f]{6,64}")


def impact(workspace: Workspace, id_or_prefix: str) -> ImpactNode:
    """Return the tree of everything that was made from an artifact or a data file.

    Args:
        workspace: need not be writable.
        id_or_prefix: an artifact's id or its beginning, an alias, a data file, or its BLAKE3 or
            the first 6 digits or more of it.

    Raises:
        ArtifactError, UsageError: none or several things fit.
    """
    graph = _Graph()
    for result in list_results(workspace):
        graph.add(result)
    text = id_or_prefix.strip().lower()
    path = expanded(id_or_prefix)
    if not _DIGEST_PREFIX.fullmatch(text) and is_file(path):
        text = digest_file(path)
        if text not in graph.data:
            raise UsageError(
                f"{path}: no stage with a result in {workspace.root} has read this file as it is "
                "now; `redco-flow why` names the data that a result was made from."
            )
    if _DIGEST_PREFIX.fullmatch(text):
        files = {one: name for one, name in graph.data.items() if one.startswith(text)}
        if len(files) == 1:
            digest, name = next(iter(files.items()))
            return ImpactNode("data", name, digest, children=graph.below(digest, frozenset()))
    artifact = ArtifactStore(workspace).get(artifact_id_of(workspace, id_or_prefix))
    made_by = artifact.produced_by
    return ImpactNode(
        "artifact",
        artifact.kind,
        artifact.id,
        stage=str(made_by.get("stage", "")),
        run=str(made_by.get("run", "")),
        children=graph.below(artifact.id, frozenset()),
    )


@dataclass
class _Graph:
    """Results, by the artifacts that they read."""

    users: dict[str, list[StageResult]] = field(default_factory=dict)
    data: dict[str, str] = field(default_factory=dict)  # digest → name

    def add(self, result: StageResult) -> None:
        taken = {one for slot in result.ingredients.get("inputs", {}).values() for one in slot}
        for name, identity in result.ingredients.get("data", {}).items():
            leaf = data_node(name, identity)
            self.data[leaf.id] = name
            taken.add(leaf.id)
        for one in taken:
            self.users.setdefault(one, []).append(result)

    def below(self, taken: str, above: frozenset[str]) -> tuple[ImpactNode, ...]:
        """The outputs of every result that took this in, oldest first."""
        above = above | {taken}
        artifact: Literal["artifact"] = "artifact"
        return tuple(
            ImpactNode(
                artifact,
                output.partition("/")[0],
                artifact_id,
                stage=result.stage,
                run=result.run,
                children=self.below(artifact_id, above),
            )
            for result in sorted(self.users.get(taken, ()), key=lambda one: one.sequence)
            for output, artifact_id in result.outputs.items()
            if artifact_id not in above
        )


@dataclass(frozen=True)
class ResultTarget:
    """A stage's result in a run, or one output or metric of it.

    Args:
        result: of the stage.
        output: an output's name; empty for none in particular.
        metric: a metric's key in the result; empty for none in particular.
        metric_name: the same as people use it, such as `val/accuracy`.
    """

    result: StageResult
    output: str = ""
    metric: str = ""
    metric_name: str = ""


Target = Artifact | ResultTarget


def find_target(workspace: Workspace, text: str) -> Target:
    """Return what `text` names.

    Raises:
        UsageError: none or several things fit; lists the candidates.
    """
    if is_alias(text):
        return ArtifactStore(workspace).get(artifact_id_of(workspace, text))
    if "/" in text:
        if (metric := _metric_of_last_run(workspace, text)) is not None:
            return metric
        run_text, _, rest = text.partition("/")
        return _in_run(workspace, find_run(workspace, run_text), rest)
    artifacts = ArtifactStore(workspace)
    if artifacts.is_prefix(text):
        return artifacts.get(text)
    try:
        run = find_run(workspace, "@last")
    except UsageError as error:
        raise UsageError(f"{text!r} is no artifact, and there are {error}") from error
    try:
        return _in_run(workspace, run, text)
    except UsageError as error:
        raise _run_for_target(workspace, text) or error from None


def _run_for_target(workspace: Workspace, text: str) -> UsageError | None:
    """Say which stages there are where a text names a run alone; None where it names none."""
    try:
        run = find_run(workspace, text)
    except UsageError:
        return None
    stages = ", ".join(f"{run.id}/{name}" for name in run_results(workspace, run))
    return UsageError(
        f"{text!r} is the run {run.id}: name one of its finished stages ({stages or 'none'}), or "
        "one of their metrics or outputs."
    )


def _metric_of_last_run(workspace: Workspace, name: str) -> ResultTarget | None:
    """A metric of the last run whose name has a slash, such as `val/accuracy`."""
    last = next(iter(list_runs(workspace)), None)
    if last is None:
        return None
    # The text may name another run, which a damaged last one does not concern.
    metrics = unless_damaged(lambda: _metrics_of(last, run_results(workspace, last)))
    return (metrics or {}).get(name)


def _metrics_of(run: RunDirectory, results: Mapping[str, StageResult]) -> dict[str, ResultTarget]:
    """The metrics of a run's finished stages by the names that people use."""
    entries = run.read_state().get("stages") or {}
    made = {
        name: {**entries.get(name, {}), "metrics": one.metrics, "artifacts": one.outputs}
        for name, one in results.items()
    }
    return {
        name: ResultTarget(results[stage], metric=key, metric_name=name)
        for name, (stage, key) in locate_metrics({**entries, **made}).items()
        if stage in results
    }


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
    metrics = _metrics_of(run, results)
    if rest in metrics:
        return metrics[rest]
    if inner and stage in results:
        return _in_stage(run, results[stage], inner)
    if near := [name for name in metrics if name.rpartition("/")[2] == rest]:
        listed = ", ".join(f"{run.id}/{name}" for name in near)
        raise UsageError(f"run {run.id} has no metric {rest!r}, only {listed}: name one of them.")
    raise UsageError(
        f"run {run.id} has no finished stage and no metric {rest!r}. Stages: "
        f"{', '.join(results) or 'none'}. Metrics: {', '.join(metrics) or 'none'}. Artifacts are "
        f"named by their id: `redco-flow artifacts` lists them."
    )


def _in_stage(run: RunDirectory, result: StageResult, name: str) -> ResultTarget:
    """An output by its name or its selector alone, or a metric."""
    if name in (result.metrics or {}):
        return ResultTarget(result, metric=name, metric_name=f"{result.stage}/{name}")
    outputs = [key for key in result.outputs if name in (key, key.partition("/")[2])]
    metrics = ", ".join(result.metrics or {}) or "none"
    if len(outputs) == 1:
        return ResultTarget(result, output=outputs[0])
    raise UsageError(
        f"stage {run.id}/{result.stage} has no output and no metric {name!r}. Outputs: "
        f"{', '.join(result.outputs) or 'none'}. Metrics: {metrics}."
    )


def trace(workspace: Workspace, artifact_or_metric: str) -> LineageNode:
    """Return the tree of everything that something was made from.

    Args:
        workspace: need not be writable.
        artifact_or_metric: an artifact's id or its beginning; @ALIAS; RUN/STAGE; RUN/STAGE/OUTPUT;
            RUN/METRIC; RUN/STAGE/METRIC; or a metric's name, of the last run.

    Raises:
        UsageError: none or several things fit; lists the candidates.
    """
    return _Tracer(workspace).node(find_target(workspace, artifact_or_metric))


class _Tracer:
    """One walk; artifacts met twice are looked up once."""

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace
        self._store = ArtifactStore(workspace)
        self._artifacts: dict[str, LineageNode] = {}
        self._aliases = AliasStore(workspace).by_artifact()

    def node(self, target: Target) -> LineageNode:
        """The tree's root."""
        if isinstance(target, Artifact):
            return self._artifact(target.id)
        result = target.result
        if target.output:
            return self._artifact(result.outputs[target.output], result)
        if not target.metric:
            return LineageNode(
                type="stage",
                name=result.stage,
                id=result.fingerprint,
                value=result.outputs,
                deleted=next(filter(None, map(self._deleted, result.outputs.values())), ""),
                production=self._production(result),
                parents=self._inputs(result, frozenset()),
            )
        return LineageNode(
            type="metric",
            name=target.metric_name,
            id=result.outputs.get("metrics", ""),
            value=(result.metrics or {})[target.metric],
            production=self._production(result),
            parents=tuple(self._artifact(one, result) for one in _measured(result)),
        )

    def _artifact(
        self,
        artifact_id: str,
        result: StageResult | None = None,
        above: frozenset[str] = frozenset(),
    ) -> LineageNode:
        """The artifact's node; made by `result` if given, else by who published it first."""
        known = self._artifacts.get(artifact_id)
        if known is not None and result is None:
            return known
        found = self._store.find(artifact_id)
        made_by: Mapping[str, Any] = found.produced_by if found else {}
        if result is None:
            result = read_result(self._workspace, str(made_by.get("fingerprint", "")))
            if result is not None and artifact_id not in result.outputs.values():
                result = None  # another computation with this fingerprint, of another workspace
        # Deleted and remade artifacts can only seem to be their own ancestors.
        parents = () if artifact_id in above else self._parents(artifact_id, found, result, above)
        node = LineageNode(
            type="artifact",
            name=found.kind if found else _kind(artifact_id, result),
            id=artifact_id,
            value=found.metadata if found else None,
            production=self._production(result) if result else _remembered(made_by),
            is_intact=self._store.is_whole(artifact_id),
            deleted=self._deleted(artifact_id),
            parents=parents,
            aliases=tuple(map(AliasNode.of, self._aliases.get(artifact_id, ()))),
        )
        self._artifacts[artifact_id] = node
        return node

    def _deleted(self, artifact_id: str) -> str:
        found = self._store.find(artifact_id)
        deletion = find_deletion(found) if found else None
        return deletion_text(deletion) if deletion else ""

    def _parents(
        self,
        artifact_id: str,
        found: Artifact | None,
        result: StageResult | None,
        above: frozenset[str],
    ) -> tuple[LineageNode, ...]:
        if result is not None:
            return self._inputs(result, above | {artifact_id})
        parents = found.parents.values() if found else ()
        return tuple(self._artifact(one, None, above | {artifact_id}) for one in parents)

    def _inputs(self, result: StageResult, above: frozenset[str]) -> tuple[LineageNode, ...]:
        """A stage's input artifacts, then its data files."""
        slots: Mapping[str, list[str]] = result.ingredients.get("inputs", {})
        ids = dict.fromkeys(artifact_id for slot in slots.values() for artifact_id in slot)
        data: Mapping[str, Any] = result.ingredients.get("data", {})
        return (
            *(self._artifact(artifact_id, None, above) for artifact_id in ids),
            *(data_node(name, identity) for name, identity in data.items()),
        )

    def _production(self, result: StageResult) -> Production:
        ingredients = result.ingredients
        return Production(
            pipeline=result.pipeline,
            stage=result.stage,
            kind=result.kind,
            run=result.run,
            attempt=result.attempt,
            fingerprint=result.fingerprint,
            config=config_leaves(result.stage, ingredients.get("settings", {}), result.origins),
            code=result.code,
            modules=dict(ingredients.get("code", {})),
            job=self._job(result),
            host=result.host,
            time=result.created_at,
            seconds=result.seconds,
            versions=result.versions,
            metrics=result.metrics or {},
        )

    def _job(self, result: StageResult) -> dict[str, Any]:
        run = RunDirectory(self._workspace.runs / result.run)
        job = unless_damaged(run.attempt(result.stage, result.attempt).read_job)
        return {**job} if job else {}


def config_leaves(
    stage: str, settings: Mapping[str, Any], origins: Mapping[str, Any]
) -> tuple[ConfigLeaf, ...]:
    """Return every setting with the place where it was written.

    Args:
        stage: the stage's name.
        settings: nested; the leaves are what is no mapping.
        origins: dotted key to `{"source", "line", "column"}`; a stage's own key goes before
            the section's at the top of the file, a key before the ones around it.
    """
    return tuple(
        ConfigLeaf(key, value, *_origin(stage, key, origins)) for key, value in _flat(settings, "")
    )


def _flat(value: Any, key: str) -> list[tuple[str, Any]]:
    if not isinstance(value, Mapping) or (key and not value):
        return [(key, value)] if key else []
    leaves: list[tuple[str, Any]] = []
    for name, inner in value.items():
        leaves += _flat(inner, f"{key}.{name}" if key else str(name))
    return leaves


def _origin(stage: str, key: str, origins: Mapping[str, Any]) -> tuple[str, int]:
    around = key
    while around:
        for candidate in (f"stages.{stage}.{around}", around):
            if candidate in origins:
                origin = origins[candidate]
                return str(origin.get("source", "default")), int(origin.get("line") or 0)
        around = around.rpartition(".")[0]
    return "default", 0


def _measured(result: StageResult) -> list[str]:
    """The artifacts that hold a stage's metrics; all its outputs if none is said to."""
    named = [one for name, one in result.outputs.items() if name.split("/")[0] == "metrics"]
    return named or list(result.outputs.values())


def _kind(artifact_id: str, result: StageResult | None) -> str:
    """A deleted artifact's kind, by the name of the output that it was."""
    outputs = result.outputs if result else {}
    return next((name.split("/")[0] for name, one in outputs.items() if one == artifact_id), "?")


def _remembered(made_by: Mapping[str, Any]) -> Production | None:
    """Return the parts of a stage that a manifest alone records, for a result that is gone."""
    if not made_by:
        return None
    code: Any = made_by.get("code") or {}
    return Production(
        pipeline=str(made_by.get("pipeline", "")),
        stage=str(made_by.get("stage", "")),
        kind=str(made_by.get("kind", "")),
        run=str(made_by.get("run", "")),
        attempt=int(made_by.get("attempt") or 0),
        fingerprint=str(made_by.get("fingerprint", "")),
        code=dict(code),
        host=str(made_by.get("host", "")),
        time=str(made_by.get("time", "")),
        versions=dict(made_by.get("versions") or {}),
    )
