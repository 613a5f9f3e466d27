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
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr
from jax.sharding import PartitionSpec

from redco_flow.engine.sharding.dataflow.handlers import HANDLERS
from redco_flow.engine.sharding.dataflow.trace import Handler, Walker
from redco_flow.engine.sharding.dataflow.values import Dim, Dims, Kind, Record, Value
from redco_flow.engine.sharding.mesh import FSDP_AXIS, MODEL_AXIS
from redco_flow.engine.step.gathering import is_over_fsdp

_LOOPS = frozenset({"scan", "while", "cond"})
# GPU compilers gather along the dim that is first in memory: else they lay parameters out again.
_LAID_OUT = "laid out"
# What stores its results, and reads operands that are stored.
_KERNELS = _LOOPS | {
    _LAID_OUT, "pallas_call", "dot_general", "ragged_dot_general", "conv_general_dilated",
    "gather", "scatter", "scatter-add", "scatter_add", "sort", "top_k", "cumsum",
}  # fmt: skip
_REDUCTIONS = ("reduce_", "arg")
# What is the same bytes under another shape or name.
_SAME_BYTES = frozenset({
    "copy", "expand_dims", "name", "now_or_again", "reduce_precision", "reshape",
    "sharding_constraint", "squeeze", "stop_gradient", "transpose",
})  # fmt: skip
# Bytes. A lookup in a smaller table, as of the values of 4-bit numbers, is elementwise.
_SMALL_TABLE = 4096
_FUSED_GATHER = "fused gather"
_OF_TIED_TABLE = {"dot_general", "scatter-add"}
# Made where they are read.
_FILLED = frozenset({"broadcast_in_dim", "iota"})


@dataclass(frozen=True)
class _Step:
    """An equation: the numbers of the arrays that it reads and makes; `inside` of a loop's body."""

    name: str
    reads: Sequence[int]
    makes: Sequence[int]
    inside: Sequence[_Step] = ()

    @property
    def stores(self) -> bool:
        return self.name in _KERNELS or self.name.startswith(_REDUCTIONS)


# A step, and the stored arrays that it reads.
_Turn = tuple[_Step, frozenset[int]]


@dataclass(frozen=True)
class _Array:
    """An array of a trace.

    Args:
        num_bytes: over all devices together, each part once; 0 of what is on the host.
        placed: by how much a constraint splits each dim; None: as the dim is split anyway.
    """

    dims: Dims
    num_bytes: int
    placed: tuple[int | None, ...] | None = None


class _StepWalker(Walker):
    """Lists a jaxpr's equations with the arrays that they read and make.

    Args:
        leaves: what the step takes, with shardings, the state's first.
    """

    def __init__(self, record: Record, leaves: Sequence[Any]) -> None:
        loops = {name: _in_loop(HANDLERS[name]) for name in _LOOPS}
        super().__init__(record, {**HANDLERS, **loops, "shard_map": _shard_map})
        self.arrays: list[_Array] = []
        self.shards: list[tuple[Dim, int]] = []
        self.steps: list[_Step] = []
        self.inside: list[_Step] = []
        self.leaves = leaves
        # The numbers of leaves that a loop's body gathers, and has laid out again for it.
        self.gathered: list[int] = []
        self.gathered_inside: list[int] = []
        self._laid_out: dict[int, int] = {}

    def numbered(
        self, value: Value, aval: Any, placed: tuple[int | None, ...] | None = None
    ) -> Value:
        """Return a value as a new array."""
        is_on_host = getattr(aval, "memory_space", None) == jax.memory.Space.Host
        num_bytes = 0 if is_on_host else _bytes_of_aval(aval)
        self.arrays.append(_Array(value.dims, num_bytes, placed))
        return replace(value, array=len(self.arrays) - 1)

    def split(self, dims: Dims, counts: Iterable[int | None]) -> None:
        """Note among how many devices dims are split."""
        self.shards += [
            (dim, count) for dim, count in zip(dims, counts, strict=False) if dim and count
        ]

    def note(self, equation: Any, operands: list[Value], results: list[Value]) -> list[Value]:
        """Add a step for an equation."""
        name, inside, self.inside = equation.primitive.name, self.inside, []
        gathered, self.gathered_inside = self.gathered_inside, []
        placed = None
        if name == "optimization_barrier":
            return operands
        if name == "sharding_constraint":
            sharding = equation.params["sharding"]
            if getattr(sharding, "mesh", None) is not None:
                sizes = sharding.mesh.shape
                # Over these axes only parameters are split, or what is saved; not what is computed.
                own = [None if axes in (FSDP_AXIS, MODEL_AXIS) else axes for axes in sharding.spec]
                self.split(operands[0].dims, _counts(own, sizes))
                placed = _counts(sharding.spec, sizes)
        if name == "shard_map" or self.is_call(equation):
            return results
        if name in _SAME_BYTES and placed is None:
            return [replace(results[0], array=operands[0].array)]
        if name not in self._handlers:
            results = [self._with_rows(value, operands) for value in results]
        made = [
            self.numbered(value, var.aval, self._stacked(value) if inside else placed)
            for value, var in zip(results, equation.outvars, strict=True)
        ]
        if name == "sharding_constraint" and self._is_laid_out(operands[0], equation):
            self.gathered += operands[0].sources
            self.arrays[-1] = replace(self.arrays[-1], num_bytes=2 * self.arrays[-1].num_bytes)
        if name == "gather" and _bytes_of_aval(equation.invars[0].aval) <= _SMALL_TABLE:
            name = _FUSED_GATHER
        reads, makes = ([value.array for value in values] for values in (operands, made))
        if inside:
            reads += self._before_loop(gathered)
        self.steps.append(_Step(name, reads, makes, inside))
        return made

    def _is_laid_out(self, operand: Value, equation: Any) -> bool:
        """Return whether a parameter is gathered along a dim that is not its first in memory."""
        if len(operand.sources) != 1:
            return False
        (number,) = operand.sources
        leaf, shape = self.leaves[number], self.shape(operand)
        first = len(leaf.shape) - len(shape)
        specs = (leaf.sharding.spec[first:], equation.params["sharding"].spec)
        split, kept = ([dim for dim, axes in enumerate(one) if is_over_fsdp(axes)] for one in specs)
        is_whole = first >= 0 and leaf.shape[first:] == shape
        is_gathered = bool(split) and not kept
        return is_whole and is_gathered and math.prod(shape[: split[0]]) > 1

    def _before_loop(self, gathered: Iterable[int]) -> list[int]:
        """Return the arrays of parameters that are laid out before a loop, each once of all."""
        for number in sorted(set(gathered) - set(self._laid_out)):
            self.arrays.append(_Array((), _bytes_of(self.leaves[number])))
            self._laid_out[number] = len(self.arrays) - 1
            self.steps.append(_Step(_LAID_OUT, [], [self._laid_out[number]]))
        return [self._laid_out[number] for number in gathered]

    def _with_rows(self, result: Value, operands: list[Value]) -> Value:
        """Return the result of an unknown operation, with the rows of an operand that has as many.

        Else windows' maxima and decompositions of matrices would be of all rows on each device.
        """
        rows = self.shape(result)[:1]
        alike = [value.dims[0] for value in operands if self.shape(value)[:1] == rows != ()]
        return result.with_dims((alike[0], *result.dims[1:])) if alike else result

    def _stacked(self, value: Value) -> tuple[int | None, ...] | None:
        """Return how a loop's result is split where each turn's is placed by a constraint."""
        turn = self.arrays[value.array] if value.array >= 0 else None
        if turn is None or turn.placed is None or len(turn.dims) == len(value.dims):
            return None
        return (1, *turn.placed)


def _bytes_of_aval(aval: Any) -> int:
    itemsize = getattr(getattr(aval, "dtype", None), "itemsize", 4)
    return int(math.prod(np.shape(aval)) * itemsize)


def _counts(spec: Iterable[Any], sizes: Mapping[str, int]) -> tuple[int | None, ...]:
    """Return among how many devices each dim is split; None where the compiler may choose."""

    def count(axes: Any) -> int | None:
        if axes is PartitionSpec.UNCONSTRAINED:
            return None
        names = axes if isinstance(axes, tuple) else () if axes is None else (axes,)
        return math.prod(sizes[axis] for axis in names)

    return tuple(map(count, spec))


def _in_loop(handler: Handler) -> Handler:
    def follow(walker: Any, *args: Any) -> list[Value]:
        outside, walker.steps, walker.gathered = (walker.steps, walker.gathered), [], []
        results = handler(walker, *args)
        walker.inside, walker.gathered_inside = walker.steps, walker.gathered
        walker.steps, walker.gathered = outside
        return results

    return follow


def _shard_map(
    walker: Any, params: dict[str, Any], operands: list[Value], shapes: list[tuple[int, ...]]
) -> list[Value]:
    """Split operands and results as the specs say; inside are each device's parts.

    Where only some axes are manual, the compiler may split over the others what a spec does not
    split: such a dim is the same inside and outside.
    """
    sizes, results = params["mesh"].shape, []
    others = set(sizes) - set(params["newly_manual_axes"])
    is_partial = any(sizes[axis] > 1 for axis in others)

    def crossing(dims: Dims, shape: tuple[int, ...], spec: PartitionSpec) -> Dims:
        """Return the dims of an array on the other side of the `shard_map`."""
        new = walker.atoms.new_dims(shape)
        axes = [*spec, *[None] * (len(new) - len(spec))]
        kept = [is_partial and one is None for one in axes]
        return tuple(a if keep else b for a, b, keep in zip(dims, new, kept, strict=True))

    for value, spec in zip(operands, params["in_specs"], strict=True):
        walker.split(value.dims, _counts(spec, sizes))
    inside = getattr(params["jaxpr"], "jaxpr", params["jaxpr"])  # closed in later versions of JAX
    parts = [
        replace(value, dims=crossing(value.dims, var.aval.shape, spec))
        for value, var, spec in zip(operands, inside.invars, params["in_specs"], strict=True)
    ]
    made = walker.walk(inside, [], parts)
    for part, shape, spec in zip(made, shapes, params["out_specs"], strict=True):
        alike = [value for value in operands if walker.shape(value) == shape]
        dims = alike[0].dims if alike else crossing(part.dims, shape, spec)
        walker.split(dims, _counts(spec, sizes))
        results.append(replace(part, dims=dims, kind=Kind.DATA))
    return results


def estimate_step(closed: ClosedJaxpr, state: Any, batch: Any) -> int:
    """Return about how many bytes a train step needs on each device.

    Args:
        closed: of the step, traced on its mesh.
        state, batch: trees of shapes with shardings, as the step takes them.
    """
    leaves = [*jax.tree.leaves(state), *jax.tree.leaves(batch)]
    walker = _StepWalker(Record(), leaves)
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
        counts = _counts(leaf.sharding.spec, sizes)
        if is_stored:
            stored.append((value.dims, math.prod(filter(None, counts))))
            counts = _counts(
                [axes if axes == MODEL_AXIS else None for axes in leaf.sharding.spec], sizes
            )
        walker.split(value.dims, counts)
        inputs.append(walker.numbered(value, leaf))
    results = walker.walk_closed(closed, inputs)
    sizes = _Sizes(walker, stored)
    last = _Step("results", [value.array for value in results], [])
    return sum(map(_bytes_of, leaves)) + round(_peak([*walker.steps, last], sizes))


def _bytes_of(leaf: Any) -> int:
    shape: tuple[int, ...] = leaf.sharding.shard_shape(leaf.shape)
    return math.prod(shape) * int(leaf.dtype.itemsize)


class _Sizes:
    """Bytes of arrays on each device.

    Args:
        stored: dims of the arrays of the state, and among how many devices each is split.
    """

    def __init__(self, walker: _StepWalker, stored: Iterable[tuple[Dims, int]]) -> None:
        self.num_devices = walker.leaves[0].sharding.mesh.size
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

    def _bytes_of(self, array: _Array) -> float:
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


def _peak(steps: Sequence[_Step], sizes: _Sizes) -> float:
    """Return the most bytes at once of what steps make, with what their loops make inside."""
    in_memory = _in_memory(steps)
    names = {number: step.name for step in steps for number in step.makes}
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
    for place, (step, found) in enumerate(turns):
        made = [number for number in step.makes if number in in_memory]
        inside = _peak(step.inside, sizes) if step.inside else 0.0
        live += sum(sizes[number] for number in made)
        highest = max(highest, live + inside)
        ended = [number for number in found if last[number] == place]
        ended += [number for number in made if number not in last]
        live -= sum(sizes[number] for number in ended)
    return highest


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
    loops = list(accumulate(int(step.name in _LOOPS) for step, _ in turns))
    moved: list[list[_Turn]] = [[] for _ in turns]
    for place, (step, found) in enumerate(turns):
        reader = min((readers[one] for one in step.makes if one in readers), default=place + 1)
        is_late = step.name == "dot_general" and loops[reader - 1] > loops[place]
        behind = loops.index(loops[place] + 1) + 1 if is_late else place
        moved[behind].append((step, found))
    return [turn for group in moved for turn in group]


def _in_memory(steps: Sequence[_Step]) -> set[int]:
    """Return the numbers of arrays that are stored."""
    made, found = set[int](), set[int]()
    for step in steps:
        if step.stores:
            found.update(step.makes)
        if step.name in _KERNELS:
            found |= made.intersection(step.reads)
        # A loop that begins with what is filled has it in its results.
        is_moved = step.name in _SAME_BYTES and not made.intersection(step.reads)
        if step.name not in _FILLED and not is_moved:
            made.update(step.makes)
    return found
