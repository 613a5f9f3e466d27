"""A run's lineage as a graph: data and stages, laid out in columns, edges from left to right."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from redco_flow.report.numbers import plural
from redco_flow.report.stage_facts import StageFacts

_WIDTH, _HEIGHT = 148, 46
_COLUMN_GAP, _ROW_GAP, _MARGIN = 42, 16, 4
_MAX_LETTERS = 19


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
