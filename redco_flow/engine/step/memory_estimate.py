"""Estimate the memory of a train step from its trace, without compiling it.

The trace is walked as for the sharding rules, which says for each array's dims along which mesh
axes they are split, by the inputs' shardings, the constraints and `shard_map`s. What is in memory
at once then follows from the order of the equations: results of products, kernels, reductions,
lookups and loops are stored, and elementwise operations only where one of those reads them, for
compilers fuse them into what uses them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr

from redco_flow.engine.sharding.dataflow.values import Dims, Kind, Record, Value
from redco_flow.engine.sharding.mesh import MODEL_AXIS
from redco_flow.engine.step.traced_arrays import (
    FILLED,
    KERNELS,
    LOOPS,
    SAME_BYTES,
    Step,
    StepWalker,
    TracedArray,
    bytes_of_leaf,
    counts_of,
)  # fmt: skip

_OF_TIED_TABLE = {"dot_general", "scatter-add"}
# A step, and the stored arrays that it reads.
_Turn = tuple[Step, frozenset[int]]


def estimate_step(closed: ClosedJaxpr, state: Any, batch: Any) -> int:
    """Return about how many bytes a train step needs on each device.

    Args:
        closed: of the step, traced on its mesh.
        state, batch: trees of shapes with shardings, as the step takes them.
    """
    leaves = [*jax.tree.leaves(state), *jax.tree.leaves(batch)]
    walker = StepWalker(Record(), leaves)
    num_stored = len(jax.tree.leaves(state))
    inputs, stored = [], []
    for number, leaf in enumerate(leaves):
        is_stored, sizes = number < num_stored, leaf.sharding.mesh.shape
        value = Value(
            walker.atoms.new_dims(leaf.shape),
            Kind.PARAMETER if is_stored else Kind.DATA,
            is_token=not is_stored,
            sources=frozenset([number] if is_stored else []),
        )
        counts = counts_of(leaf.sharding.spec, sizes)
        if is_stored:
            stored.append((value.dims, math.prod(filter(None, counts))))
            counts = counts_of(
                [axes if axes == MODEL_AXIS else None for axes in leaf.sharding.spec], sizes
            )
        walker.split(value.dims, counts)
        inputs.append(walker.numbered(value, leaf))
    results = walker.walk_closed(closed, inputs)
    sizes = _Sizes(walker, stored)
    last = Step("results", [walker.base(value) for value in results], [])
    return sum(map(bytes_of_leaf, leaves)) + round(_peak([*walker.body.steps, last], sizes))


class _Sizes:
    """Bytes of arrays on each device.

    Args:
        stored: dims of the arrays of the state, and among how many devices each is split.
    """

    def __init__(self, walker: StepWalker, stored: Iterable[tuple[Dims, int]]) -> None:
        self.num_devices, self.is_tpu = walker.leaves[0].sharding.mesh.size, walker.is_tpu
        self._arrays, self._atoms = walker.arrays, walker.atoms
        self._split: dict[int, int] = {}
        for dim, count in walker.shards:
            for atom in self._atoms.expand(dim):  # the first are the major ones
                shared = math.gcd(self._atoms.size((atom,)), count)
                self._split[atom] = max(self._split.get(atom, 1), shared)
                count //= shared
        self._stored: dict[tuple[int, ...], int] = {}
        for dims, count in stored:
            atoms = self._atoms_of(dims)
            if len(atoms) > 1:
                self._stored[atoms] = max(self._stored.get(atoms, 1), count)

        self._known: dict[int, float] = {}

    def __getitem__(self, number: int) -> float:
        if number not in self._known:
            self._known[number] = self._bytes_of(self._arrays[number])
        return self._known[number]

    def shape(self, number: int) -> tuple[int, ...]:
        """Return an array's sizes and, last, its bytes."""
        array = self._arrays[number]
        return (*map(self._atoms.size, array.dims), array.num_bytes)

    def _bytes_of(self, array: TracedArray) -> float:
        by_dim = [
            math.prod(self._split.get(atom, 1) for atom in self._atoms.expand(dim))
            for dim in array.dims
        ]
        if array.placed is not None:
            placed = [*array.placed, *[1] * len(by_dim)]
            by_dim = [own if one is None else one for own, one in zip(by_dim, placed, strict=False)]
            return array.num_bytes / math.prod(by_dim)
        # Gradients and updates lie as what they are of.
        count = self._stored.get(self._atoms_of(array.dims))
        return array.num_bytes / (math.prod(by_dim) if count is None else count)

    def _atoms_of(self, dims: Dims) -> tuple[int, ...]:
        return tuple(sorted(atom for dim in dims for atom in self._atoms.expand(dim)))


def _peak(steps: Sequence[Step], sizes: _Sizes) -> float:
    """Return the most bytes at once of what steps make, with what their loops make inside."""
    in_memory = _in_memory(steps)
    names = _makers(steps)
    read_from: dict[int, frozenset[int]] = {}

    def origins(number: int) -> frozenset[int]:
        """Return the stored arrays that are read to compute one."""
        if number in in_memory:
            return frozenset([number])
        return read_from.get(number, frozenset())

    turns: list[_Turn] = []
    for step in steps:
        found = frozenset[int]().union(*map(origins, step.reads))
        is_read = step.stores or in_memory.intersection(step.makes) or not step.makes
        if step.name == "add_any" and {names.get(number) for number in found} == _OF_TIED_TABLE:
            _make_late(turns, found)
        turns.append((step, found if is_read else frozenset()))
        read_from.update(dict.fromkeys(step.makes, found))
    if sizes.num_devices > 1:
        turns = _with_late_products(turns)
    last = {number: place for place, (_, found) in enumerate(turns) for number in found}
    live = highest = 0.0
    begun = _begun([step for step, _ in turns], in_memory, sizes)
    for place, (step, found) in enumerate(turns):
        made = [number for number in step.makes if number in in_memory]
        inside = _peak(step.inside, sizes) + _before_turns(step, names, sizes)
        live += sum(sizes[number] for number in begun[place])
        highest = max(highest, live + inside)
        ended = [number for number in found if last[number] == place]
        ended += [number for number in made if number not in last]
        live -= sum(sizes[number] for number in ended)
    return highest


def _begun(steps: Sequence[Step], in_memory: set[int], sizes: _Sizes) -> list[list[int]]:
    """Return by step the stored arrays that are in memory from it on.

    GPU and CPU compilers make zeros of one shape at once, those of later loops with those of the
    first; TPUs' do not.
    """
    first: dict[tuple[int, ...], int] = {}
    begun: list[list[int]] = [[] for _ in steps]
    for place, step in enumerate(steps):
        for number in in_memory.intersection(step.makes):
            is_zeros = number in step.stacks and not sizes.is_tpu
            at = first.setdefault(sizes.shape(number), place) if is_zeros else place
            begun[at].append(number)
    return begun


def _makers(steps: Sequence[Step]) -> dict[int, str]:
    """Return by array the name of what makes it."""
    return {number: step.name for step in steps for number in step.makes}


def _before_turns(loop: Step, makers: Mapping[int, str], sizes: _Sizes) -> float:
    """Return the bytes of what a loop's inner loops begin with and is made before the loop.

    GPU compilers make what is filled once, and copy it in each turn. Those for several devices
    compute the last turn behind the loop, and make its zeros with those of the loop.
    """
    if sizes.is_tpu:
        return 0.0
    inner = [step for step in loop.inside if step.name in LOOPS]
    within = _makers(loop.inside)
    read = {one for step in inner for one in step.reads if within.get(one) in FILLED}
    if sizes.num_devices > 1:
        filled = {sizes.shape(one) for one in loop.reads if makers.get(one) in FILLED}
        read.update(one for step in inner for one in step.stacks if sizes.shape(one) in filled)
    return sum({sizes.shape(one): sizes[one] for one in read}.values())


def _make_late(turns: list[_Turn], added: frozenset[int]) -> None:
    """Put a product before the scatter that it is added to: a tied table's gradient as a head."""
    places = [place for place, (step, _) in enumerate(turns) if added.intersection(step.makes)]
    if [turns[place][0].name for place in places] == ["dot_general", "scatter-add"]:
        first, second = places
        turns.insert(second - 1, turns.pop(first))


def _with_late_products(turns: list[_Turn]) -> list[_Turn]:
    """Put products behind the next loop if it does not need them, as of a head's gradient.

    Compilers for several devices do so, to send one array while the next one is computed.
    """
    readers: dict[int, int] = {}
    for place, (_, found) in enumerate(turns):
        for number in found:
            readers.setdefault(number, place)
    loops = list(accumulate(int(step.name in LOOPS) for step, _ in turns))
    moved: list[list[_Turn]] = [[] for _ in turns]
    for place, (step, found) in enumerate(turns):
        reader = min((readers[one] for one in step.makes if one in readers), default=place + 1)
        is_late = step.name == "dot_general" and loops[reader - 1] > loops[place]
        behind = loops.index(loops[place] + 1) + 1 if is_late else place
        moved[behind].append((step, found))
    return [turn for group in moved for turn in group]


def _in_memory(steps: Sequence[Step]) -> set[int]:
    """Return the numbers of arrays that are stored."""
    made, found = set[int](), set[int]()
    for step in steps:
        if step.stores:
            found.update(step.makes)
        if step.name in KERNELS:
            found |= made.intersection(step.reads)
        # A loop that begins with what is filled has it in its results.
        is_moved = step.name in SAME_BYTES and not made.intersection(step.reads)
        if step.name not in FILLED and not is_moved:
            made.update(step.makes)
    return found
