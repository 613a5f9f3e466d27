"""Nodes of a lineage: metrics, stages, artifacts and, at the leaves, data files.

Pure data, with a JSON form; `lineage.py` finds it and the command line draws it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from redco_flow.records import digest_json
from redco_flow.tracking.aliases import Alias

NodeType = Literal["metric", "stage", "artifact", "data"]


@dataclass(frozen=True)
class ConfigLeaf:
    """One setting and where it was written.

    Args:
        key: dotted, within the stage, such as `schedule.type`.
        value: anything JSON.
        source: a file's path, "command line" or "default".
        line: 1-based; 0 where there is none.
    """

    key: str
    value: Any
    source: str
    line: int

    @property
    def location(self) -> str:
        """`file:line`, or just the source."""
        return f"{self.source}:{self.line}" if self.line else self.source


@dataclass(frozen=True)
class Production:
    """The attempt that computed a result.

    Args:
        pipeline, stage, kind, run, attempt, fingerprint: which computation.
        config: every setting, with its place.
        code: commit, dirty, patch_digest; empty outside a repository.
        modules: source file digests by dotted name.
        job: job.json (executor, job_id, …); empty if the run's directory is gone.
        host: where it ran.
        time: when, for people.
        seconds: how long.
        versions: package to version.
        metrics: the stage's metrics.
    """

    pipeline: str
    stage: str
    kind: str
    run: str
    attempt: int
    fingerprint: str
    config: tuple[ConfigLeaf, ...] = ()
    code: dict[str, Any] = field(default_factory=dict)
    modules: dict[str, str] = field(default_factory=dict)
    job: dict[str, Any] = field(default_factory=dict)
    host: str = ""
    time: str = ""
    seconds: float = 0.0
    versions: dict[str, str] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class AliasNode:
    """A name that an artifact has now, and how it got it.

    Args:
        name: `@MODEL/ALIAS`.
        event: promoted or rolled_back.
        time, by, reason: when, who and why.
        conditions: those that held.
    """

    name: str
    event: str
    time: str
    by: str
    reason: str = ""
    conditions: tuple[str, ...] = ()

    @classmethod
    def of(cls, alias: Alias) -> AliasNode:
        """Return what is shown of an alias."""
        now = alias.current
        conditions = tuple(str(one.get("condition", "")) for one in now.comparisons)
        return cls(str(alias.name), now.event, now.time, now.by, now.reason, conditions)


@dataclass(frozen=True)
class LineageNode:
    """One thing and what it was made from.

    Args:
        type: what it is.
        name: the metric's or stage's name, the artifact's kind, the data file's name.
        id: an artifact's id, a data file's BLAKE3, a hub repository's commit, a stage's
            fingerprint; a metric's artifact.
        value: a metric's value, a stage's outputs (name to id), a data set's identity.
        production: how it was made; None for data, and for an artifact whose result is gone.
        is_intact: an artifact's files are all there; true for everything else.
        deleted: when and by which command the files of an artifact, or of an output of a stage,
            were deleted; empty where they were not.
        parents: what it was made from.
        aliases: the names that an artifact has now.
    """

    type: NodeType
    name: str
    id: str
    value: Any = None
    production: Production | None = None
    is_intact: bool = True
    deleted: str = ""
    parents: tuple[LineageNode, ...] = ()
    aliases: tuple[AliasNode, ...] = ()

    def walk(self) -> Iterator[LineageNode]:
        """Yield this node and everything above it, each before its parents."""
        yield self
        for parent in self.parents:
            yield from parent.walk()

    def leaves(self) -> Iterator[LineageNode]:
        """Yield the nodes without parents, each once."""
        seen: set[tuple[str, str]] = set()
        for node in self.walk():
            if not node.parents and (node.type, node.id) not in seen:
                seen.add((node.type, node.id))
                yield node

    def to_json(self) -> dict[str, Any]:
        """Return the tree as one JSON value."""
        return asdict(self)


@dataclass(frozen=True)
class ImpactNode:
    """One thing and what was made from it.

    Args:
        type: "artifact" or "data".
        name: the artifact's kind, or the data file's name.
        id: the artifact's id, or the data file's BLAKE3.
        stage: the stage that made it; empty for data.
        run: the run that made it; empty for data.
        children: what was made from it.
    """

    type: Literal["artifact", "data"]
    name: str
    id: str
    stage: str = ""
    run: str = ""
    children: tuple[ImpactNode, ...] = ()

    def walk(self) -> Iterator[ImpactNode]:
        """Yield this node and everything below it, each before its children."""
        yield self
        for child in self.children:
            yield from child.walk()

    def to_json(self) -> dict[str, Any]:
        """Return the tree as one JSON value."""
        return asdict(self)


def data_node(name: str, identity: Any) -> LineageNode:
    """A leaf: a file by its digest, a repository of the hub by its commit, else by all of it."""
    if isinstance(identity, str):
        return LineageNode(type="data", name=name, id=identity)
    if isinstance(identity, dict) and isinstance(commit := identity.get("commit"), str):
        return LineageNode(type="data", name=name, id=commit, value=identity)
    return LineageNode(type="data", name=name, id=digest_json(identity), value=identity)
