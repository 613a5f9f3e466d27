"""Find kernels that fuse several parts in one dim, each of which is to be split by itself.

Such a kernel is stored with its columns sorted by shard if the function takes the parts apart again
before anything else looks along them, which a second trace tells.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import jax

from redco_flow.engine.sharding.dataflow.trace import function_jaxpr
from redco_flow.engine.sharding.dataflow.values import (
    Atoms,
    Cut,
    Dim,
    Dims,
    Fact,
    Lookup,
    Product,
    Record,
)
from redco_flow.engine.sharding.fused_parts import FusedParts
from redco_flow.engine.sharding.fused_use import compute_by_shard
from redco_flow.engine.sharding.splits import Roles, SplitChoice, choose_splits, on_one_device


@dataclass(frozen=True)
class Apart:
    """A parameter's dim and the parameters that its parts are read as.

    Args:
        cut: its position in `Record.cuts`.
    """

    position: int
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
        for position, dim in enumerate(dims):
            cut = next((n for n in accepted if _begins(record.atoms, dim, record.cuts[n])), None)
            if cut is None or number in found.apart:
                continue
            count = len(parameters)
            parameters += _each_part(record.atoms, dims, position, record.cuts[cut])
            found.apart[number] = Apart(position, cut, tuple(range(count, len(parameters))))
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
    positions = [n for n, dim in enumerate(event.outputs) if _begins(record.atoms, dim, cut)]
    if not positions:
        return [event]
    found = []
    for part, outputs in enumerate(_each_part(record.atoms, event.outputs, positions[0], cut)):
        sources = (event.sources - set(parted)) | {apart[n].numbers[part] for n in parted}
        found += _apart(record, apart, replace(event, sources=sources, outputs=outputs))
    return found


def _begins(atoms: Atoms, dim: Dim, cut: Cut) -> bool:
    whole = atoms.expand(cut.whole)
    return atoms.expand(dim)[: len(whole)] == whole


def _each_part(atoms: Atoms, dims: Dims, position: int, cut: Cut) -> list[Dims]:
    rest = atoms.expand(dims[position])[len(atoms.expand(cut.whole)) :]
    return [(*dims[:position], (*part, *rest), *dims[position + 1 :]) for part in cut.parts]


@dataclass(frozen=True)
class FusedChoice:
    """The split and replicated atoms, with the parts of fused kernels apart.

    Args:
        parted: what `choice` was made of.
        fused: by the parameter's number.
    """

    choice: SplitChoice
    parted: PartedRecord
    fused: dict[int, FusedParts]


def choose_fused(
    record: Record,
    num_shards: int,
    numbers: Collection[int],
    params: Any,
    function: Callable[..., Any],
    inputs: Sequence[Any],
) -> FusedChoice:
    """Choose what is split; along parts of several sizes only where all of them can be.

    Args:
        numbers: of the parameters that may be stored sorted by shard.
        params, function, inputs: what was traced.
    """
    refused: set[int] = set()
    while True:
        parted = take_apart(record, refused)
        choice = choose_splits(Roles(parted.record), num_shards)
        fused = {n: parts for n in numbers if (parts := _read_fused(choice, parted, n))}
        fused = _keep_fit(fused, params, function, inputs)
        real = range(len(record.parameters))
        failed = {parted.apart[n].cut for n in real if n in parted.apart and n not in fused}
        if not failed:
            return FusedChoice(choice, parted, fused)
        refused |= failed


def _keep_fit(
    fused: dict[int, FusedParts], params: Any, function: Callable[..., Any], inputs: Sequence[Any]
) -> dict[int, FusedParts]:
    """Keep those whose parts the function takes apart before it looks along their columns."""
    count = len(jax.tree.leaves(params))
    while fused:
        unfit: set[int] = set()
        in_order = [fused.get(number) for number in range(count)]
        with on_one_device():
            function_jaxpr(compute_by_shard(function, in_order, unfit.update), params, inputs)
        if not unfit:
            break
        # A kernel that needs its own order leaves its bias without a partner: look again.
        fused = {number: parts for number, parts in fused.items() if number not in unfit}
    return fused


def _read_fused(choice: SplitChoice, parted: PartedRecord, number: int) -> FusedParts | None:
    for position in range(len(choice.roles.parameters[number])):
        parts = _read_parts(choice, parted, number, position)
        if len(parts) > 1:
            return FusedParts(position, parts, choice.num_shards)
    return None


def _read_parts(
    choice: SplitChoice, parted: PartedRecord, number: int, position: int
) -> tuple[int, ...]:
    """Return the sizes of a dim's parts that are each split; () where one of them is not."""
    apart = parted.apart.get(number)
    if apart is not None and apart.position == position:
        found = [_read_parts(choice, parted, part, position) for part in apart.numbers]
        return tuple(chain(*found)) if all(found) else ()
    roles, dim = choice.roles, choice.roles.parameters[number][position]
    first = next((position for position, atom in enumerate(dim) if atom in choice.splits), None)
    split = None if first is None else choice.split_of(dim[first:])
    if split is None or split.is_padded:
        return ()
    return (roles.size(dim[first:]),) * roles.size(dim[:first])
