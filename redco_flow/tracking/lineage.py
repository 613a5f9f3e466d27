"""Where a result came from: from a metric or an artifact back to the data files' digests.

Reads published results and manifests, and of a run only what names its stages' results. Knows
no formatting. The way forward, `impact`, is in `impact.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from redco_flow.tracking.artifacts import Artifact, ArtifactStore
from redco_flow.tracking.impact import impact as impact
from redco_flow.tracking.lineage_nodes import ConfigLeaf, LineageNode, Production, data_node
from redco_flow.tracking.lineage_target import Target, find_target
from redco_flow.tracking.results import StageResult, read_result
from redco_flow.tracking.run_directory import RunDirectory
from redco_flow.tracking.typed_records import unless_damaged
from redco_flow.tracking.workspace import Workspace


def trace(workspace: Workspace, artifact_or_metric: str) -> LineageNode:
    """Return the tree of everything that something was made from.

    Args:
        workspace: need not be writable.
        artifact_or_metric: an artifact's id or its beginning; RUN/STAGE; RUN/STAGE/OUTPUT;
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
                production=self._production(result),
                parents=self._inputs(result, frozenset()),
            )
        return LineageNode(
            type="metric",
            name=target.metric,
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
        result = result or read_result(self._workspace, str(made_by.get("fingerprint", "")))
        # Deleted and remade artifacts can only seem to be their own ancestors.
        parents = () if artifact_id in above else self._parents(artifact_id, found, result, above)
        node = LineageNode(
            type="artifact",
            name=found.kind if found else _kind(artifact_id, result),
            id=artifact_id,
            value=found.metadata if found else None,
            production=self._production(result) if result else _remembered(made_by),
            is_intact=self._store.is_whole(artifact_id),
            parents=parents,
        )
        self._artifacts[artifact_id] = node
        return node

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
    """What a manifest alone tells of a stage whose result is gone."""
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
