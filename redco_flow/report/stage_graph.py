"""A run's lineage: what each artifact is made of, and as a graph of data and stages in columns."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from redco_flow.report.numbers import duration, moment, plural
from redco_flow.report.stage_facts import StageFacts
from redco_flow.tracking.lineage import trace
from redco_flow.tracking.lineage_nodes import ConfigLeaf, LineageNode, Production
from redco_flow.tracking.run_directory import RunDirectory
from redco_flow.tracking.workspace import Workspace

_WIDTH, _HEIGHT = 148, 46
_COLUMN_GAP, _ROW_GAP, _MARGIN = 42, 16, 4
_MAX_LETTERS = 19

_SHORT = 12
_MAX_VALUE = 160


@dataclass(frozen=True)
class GraphNode:
    """A box.

    Args:
        name: of the stage; "data" for what one reads.
        note: what the stage made; how many files.
        type: "stage" or "data".
        x, y: its upper left corner.
    """

    name: str
    note: str
    type: str
    x: int
    y: int

    @property
    def short_name(self) -> str:
        """As much of the name as fits."""
        return _shortened(self.name)

    @property
    def short_note(self) -> str:
        """As much of the note as fits."""
        return _shortened(self.note)


@dataclass(frozen=True)
class StageGraph:
    """The boxes, and the edges as paths of SVG.

    Args:
        description: the graph in a sentence, for those who do not see it.
    """

    nodes: Sequence[GraphNode]
    edges: Sequence[str]
    width: int
    height: int
    description: str


def stage_graph(stages: Iterable[StageFacts]) -> StageGraph | None:
    """Return how a run's finished stages build on each other and on data; None without any."""
    finished = [stage for stage in stages if stage.result is not None]
    parents = _parents(finished)
    if not parents:
        return None
    columns = _columns(parents)
    notes = dict(_notes(finished))
    nodes = {
        name: GraphNode(
            name="data" if name.startswith(_DATA) else name,
            note=notes[name],
            type="data" if name.startswith(_DATA) else "stage",
            x=_MARGIN + column * (_WIDTH + _COLUMN_GAP),
            y=_MARGIN + row * (_HEIGHT + _ROW_GAP),
        )
        for column, names in enumerate(columns)
        for row, name in enumerate(names)
    }
    edges = [(nodes[one], nodes[name]) for name, found in parents.items() for one in found]
    said = ", ".join(f"{old.name} to {new.name}" for old, new in edges)
    return StageGraph(
        nodes=list(nodes.values()),
        edges=[_path(*edge) for edge in edges],
        width=2 * _MARGIN + len(columns) * (_WIDTH + _COLUMN_GAP) - _COLUMN_GAP,
        height=2 * _MARGIN + max(map(len, columns)) * (_HEIGHT + _ROW_GAP) - _ROW_GAP,
        description=f"What was made from what: {said or 'one stage'}.",
    )


_DATA = "data of "  # before the name of the stage that reads them


def _parents(stages: Sequence[StageFacts]) -> dict[str, list[str]]:
    """The boxes, and for each those that it builds on."""
    makers = {id: stage.name for stage in stages for id in stage.outputs.values()}
    parents: dict[str, list[str]] = {}
    for stage in stages:
        assert stage.result is not None
        inputs = stage.result.ingredients.get("inputs", {}).values()
        found = dict.fromkeys(makers[id] for ids in inputs for id in ids if id in makers)
        if stage.result.ingredients.get("data"):
            parents[f"{_DATA}{stage.name}"] = []
            found[f"{_DATA}{stage.name}"] = None
        parents[stage.name] = [name for name in found if name != stage.name]
    return parents


def _columns(parents: Mapping[str, Sequence[str]]) -> list[list[str]]:
    """The boxes by their distance from the data; a stage comes after all it builds on."""
    depths: dict[str, int] = {}
    for name, found in parents.items():  # in the pipeline's order, in which inputs come first
        depths[name] = max((depths.get(one, 0) + 1 for one in found), default=0)
    columns: list[list[str]] = [[] for _ in range(max(depths.values()) + 1)]
    for name, depth in depths.items():
        columns[depth].append(name)
    return columns


def _notes(stages: Sequence[StageFacts]) -> Iterator[tuple[str, str]]:
    for stage in stages:
        assert stage.result is not None
        yield stage.name, ", ".join(dict.fromkeys(one.partition("/")[0] for one in stage.outputs))
        data = stage.result.ingredients.get("data") or {}
        yield f"{_DATA}{stage.name}", plural(len(data), "source")


def _path(old: GraphNode, new: GraphNode) -> str:
    x1, y1 = old.x + _WIDTH, old.y + _HEIGHT // 2
    x2, y2 = new.x, new.y + _HEIGHT // 2
    middle = (x1 + x2) // 2
    return f"M{x1} {y1}C{middle} {y1} {middle} {y2} {x2} {y2}"


def _shortened(text: str) -> str:
    return text if len(text) <= _MAX_LETTERS else f"{text[: _MAX_LETTERS - 1]}…"


@dataclass(frozen=True)
class Setting:
    """One setting and where it was written: `file:line`, "command line" or "default"."""

    key: str
    value: str
    location: str


@dataclass(frozen=True)
class LineageItem:
    """One thing in the tree.

    Args:
        type: metric, stage, artifact or data.
        name: the stage's name, the artifact's kind, the data file's name.
        id: whole; a data file's is its BLAKE3.
        note: anything else that identifies it, or what is wrong with it.
        anchor: its place in the page; empty for what was shown before.
        link: the place where it, or how it was made, was shown before.
        link_text: what is to be seen there.
        made_by: how it was made, in short sentences.
        written: settings that were written.
        defaults: settings that were not written.
        parents: what it was made from.
    """

    type: str
    name: str
    id: str
    note: str = ""
    is_intact: bool = True
    anchor: str = ""
    link: str = ""
    link_text: str = ""
    made_by: tuple[str, ...] = ()
    written: tuple[Setting, ...] = ()
    defaults: tuple[Setting, ...] = ()
    parents: tuple[LineageItem, ...] = ()

    @property
    def short_id(self) -> str:
        """Enough of the id to name it; data by all of it, for it must be found elsewhere."""
        return self.id if self.type == "data" else self.id[:_SHORT]


def lineage_items(
    run: RunDirectory, workspace: Workspace, stages: Iterable[StageFacts]
) -> list[LineageItem]:
    """Return the trees of the stages that no other stage of the run builds on.

    Raises:
        UsageError, OSError, ValueError: the records do not allow to walk back.
    """
    finished = [stage for stage in stages if stage.result is not None]
    used = {one for stage in finished for one in _inputs(stage)}
    shown: dict[str, str] = {}
    return [
        _item(trace(workspace, f"{run.id}/{stage.name}"), shown, run.id)
        for stage in finished
        if used.isdisjoint(stage.outputs.values())
    ]


def _inputs(stage: StageFacts) -> set[str]:
    assert stage.result is not None
    slots: dict[str, list[str]] = stage.result.ingredients.get("inputs", {})
    return {one for ids in slots.values() for one in ids}


def _item(node: LineageNode, shown: dict[str, str], run: str, code: str = "") -> LineageItem:
    """A node with everything above it.

    Args:
        shown: remembers anchors by id.
        run, code: known from the page already, so not repeated.
    """
    made = node.production
    if node.id in shown:
        return _seen(node, shown[node.id], "shown above")
    if made and made.fingerprint in shown:
        return _seen(node, shown[made.fingerprint], "made together with this one")
    anchor = f"made-{len(shown) + 1}"
    if node.type != "data":
        shown[node.id] = anchor
    if made and made.fingerprint:
        shown[made.fingerprint] = anchor
    leaves = made.config if made else ()
    return LineageItem(
        type=node.type,
        name=node.name,
        id=node.id,
        note=_note(node),
        is_intact=node.is_intact,
        anchor=anchor if node.type != "data" else "",
        made_by=_made_by(made, run, code) if made else (),
        written=tuple(_setting(leaf) for leaf in leaves if leaf.source != "default"),
        defaults=tuple(_setting(leaf) for leaf in leaves if leaf.source == "default"),
        parents=tuple(
            _item(parent, shown, made.run if made else run, _code(made) if made else code)
            for parent in node.parents
        ),
    )


def _seen(node: LineageNode, anchor: str, text: str) -> LineageItem:
    return LineageItem(
        node.type, node.name, node.id, is_intact=node.is_intact, link=anchor, link_text=text
    )


def _note(node: LineageNode) -> str:
    if node.type == "data":
        return "" if node.value is None else _short(node.value)
    if node.type == "stage" and isinstance(node.value, dict):
        return ", ".join(f"{output} {one[:_SHORT]}" for output, one in node.value.items())
    if node.type == "artifact" and node.production is None:
        return "nothing is known of how it was made"
    return node.deleted


def _made_by(made: Production, run: str, code: str) -> tuple[str, ...]:
    parts = [
        f"by stage {made.stage}",
        f"of run {made.run}" if made.run and made.run != run else "",
        f"attempt {made.attempt}",
        f"job {made.job['job_id']}" if made.job.get("job_id") else "",
        f"on {made.host}" if made.host else "",
        f"in {duration(made.seconds)}" if made.seconds else "",
        moment(made.time) if made.time else "",
    ]
    own_code = _code(made)
    return (" · ".join(filter(None, parts)), *((own_code,) if own_code != code else ()))


def _code(made: Production) -> str:
    commit = str(made.code.get("commit") or "")[:_SHORT]
    patch = str(made.code.get("patch_digest") or "")[:_SHORT]
    changed = f" with uncommitted changes (patch {patch})" if made.code.get("dirty") else ""
    base = f"commit {commit}{changed}" if commit else "outside a git repository"
    return f"code: {base}"


def _setting(leaf: ConfigLeaf) -> Setting:
    return Setting(leaf.key, _short(leaf.value), leaf.location)


def _short(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _MAX_VALUE else f"{text[: _MAX_VALUE - 1]}…"
