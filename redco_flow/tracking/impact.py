"""What was made from an artifact or a data file, directly and further on.

Reads every published result once; knows no formatting.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from redco_flow.tracking.artifacts import ArtifactStore
from redco_flow.tracking.lineage_nodes import ImpactNode, data_node
from redco_flow.tracking.results import StageResult, list_results
from redco_flow.tracking.workspace import Workspace

_DIGEST_PREFIX = re.compile(r"[0-9a-f]{6,64}")


def impact(workspace: Workspace, id_or_prefix: str) -> ImpactNode:
    """Return the tree of everything that was made from an artifact or a data file.

    Args:
        workspace: need not be writable.
        id_or_prefix: an artifact's id or its beginning, or a data file's BLAKE3 or its first 6
            digits or more.

    Raises:
        ArtifactError, UsageError: none or several things fit.
    """
    graph = _Graph()
    for result in list_results(workspace):
        graph.add(result)
    text = id_or_prefix.strip().lower()
    if _DIGEST_PREFIX.fullmatch(text):
        files = {one: name for one, name in graph.data.items() if one.startswith(text)}
        if len(files) == 1:
            digest, name = next(iter(files.items()))
            return ImpactNode("data", name, digest, children=graph.below(digest, frozenset()))
    artifact = ArtifactStore(workspace).get(id_or_prefix)
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
    """Which results took what in."""

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
