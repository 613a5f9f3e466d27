"""Read a parameter that fuses parts of several sizes as several parameters.

What a trace found out about its columns then holds for each part by itself. Knows records alone.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace

from redco_flow.engine.dataflow.atoms import Atoms, Dim
from redco_flow.engine.dataflow.values import Cut, Dims, Fact, Lookup, Product, Record


@dataclass(frozen=True)
class Apart:
    """A parameter's dim and the parameters that its parts are read as.

    Args:
        cut: its place in `Record.cuts`.
    """

    place: int
    cut: int
    numbers: tuple[int, ...]


@dataclass
class PartedRecord:
    """A record in which parts are parameters of their own, numbered behind all others.

    Args:
        apart: by the fused parameter's number.
    """

    record: Record
    apart: dict[int, Apart] = field(default_factory=dict)

    def first_part(self, number: int) -> int:
        """Return the number of a parameter's first part; its own where it has none."""
        return self.first_part(self.apart[number].numbers[0]) if number in self.apart else number


def take_apart(record: Record, refused: Collection[int]) -> PartedRecord:
    """Return what a record says of parts.

    Args:
        refused: cuts whose parts are not read as parameters: nothing along them is split.
    """
    parameters = list(record.parameters)
    found = PartedRecord(replace(record, parameters=parameters))
    accepted = [n for n in range(len(record.cuts)) if n not in refused]
    for number, dims in enumerate(parameters):
        for place, dim in enumerate(dims):
            cut = next((n for n in accepted if _begins(record.atoms, dim, record.cuts[n])), None)
            if cut is None or number in found.apart:
                continue
            count = len(parameters)
            parameters += _each_part(record.atoms, dims, place, record.cuts[cut])
            found.apart[number] = Apart(place, cut, tuple(range(count, len(parameters))))
    events: list[Product | Lookup] = []
    for event in record.events:
        events += _apart(record, found.apart, event) if isinstance(event, Product) else [event]
    found.record = replace(found.record, events=events, facts=_facts(record, found, refused))
    return found


def _facts(record: Record, found: PartedRecord, refused: Collection[int]) -> dict[Fact, list[Dim]]:
    used = {apart.cut for apart in found.apart.values()} - set(refused)
    others = [cut for number, cut in enumerate(record.cuts) if number not in used]
    sliced = [dim for cut in others for dim in (cut.whole, *cut.parts)]
    return {**record.facts, Fact.SLICED: [*record.facts.get(Fact.SLICED, []), *sliced]}


def _apart(record: Record, apart: dict[int, Apart], event: Product) -> list[Product]:
    """Return a product as one for each part that it puts out."""
    parted = sorted(event.sources & apart.keys())
    if not parted:
        return [event]
    cut = record.cuts[apart[parted[0]].cut]
    places = [n for n, dim in enumerate(event.outputs) if _begins(record.atoms, dim, cut)]
    if not places:
        return [event]
    found = []
    for part, outputs in enumerate(_each_part(record.atoms, event.outputs, places[0], cut)):
        sources = (event.sources - set(parted)) | {apart[n].numbers[part] for n in parted}
        found += _apart(record, apart, replace(event, sources=sources, outputs=outputs))
    return found


def _begins(atoms: Atoms, dim: Dim, cut: Cut) -> bool:
    whole = atoms.expand(cut.whole)
    return atoms.expand(dim)[: len(whole)] == whole


def _each_part(atoms: Atoms, dims: Dims, place: int, cut: Cut) -> list[Dims]:
    rest = atoms.expand(dims[place])[len(atoms.expand(cut.whole)) :]
    return [(*dims[:place], (*part, *rest), *dims[place + 1 :]) for part in cut.parts]
