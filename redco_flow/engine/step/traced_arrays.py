"""List the equations of a train step's trace, with the arrays that they read and make.

What GPU compilers add is listed, too: parameters that are laid out again, and arrays that are
copied before a loop because their dims are in another order in memory than the loop reads them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from redco_flow.engine.sharding.dataflow.handlers import HANDLERS
from redco_flow.engine.sharding.dataflow.trace import Handler, Walker, scan_sizes
from redco_flow.engine.sharding.dataflow.values import Dim, Dims, Kind, Record, Value
from redco_flow.engine.sharding.mesh import FSDP_AXIS, MODEL_AXIS
from redco_flow.engine.step.gathering import is_over_fsdp

LOOPS = frozenset({"scan", "while", "cond"})
# GPU compilers gather along the dim that is first in memory: else they lay parameters out again.
LAID_OUT = "laid out"
# What stores its results, and reads operands that are stored.
KERNELS = LOOPS | {
    LAID_OUT, "pallas_call", "dot_general", "ragged_dot_general", "conv_general_dilated",
    "gather", "scatter", "scatter-add", "scatter_add", "sort", "top_k", "cumsum",
}  # fmt: skip
_REDUCTIONS = ("reduce_", "arg")
# What is the same bytes under another shape or name.
SAME_BYTES = frozenset({
    "copy", "expand_dims", "name", "now_or_again", "reduce_precision", "reshape",
    "sharding_constraint", "squeeze", "stop_gradient", "transpose",
})  # fmt: skip
# Bytes. A lookup in a smaller table, as of the values of 4-bit numbers, is elementwise.
_SMALL_TABLE = 4096
_FUSED_GATHER = "fused gather"
# Made where they are read.
FILLED = frozenset({"broadcast_in_dim", "iota"})


@dataclass(frozen=True)
class Step:
    """An equation: the numbers of the arrays that it reads and makes.

    Args:
        inside: the steps of a loop's body.
        stacks: results of a loop that it fills turn by turn, in arrays of zeros.
    """

    name: str
    reads: Sequence[int]
    makes: Sequence[int]
    inside: Sequence[Step] = ()
    stacks: Sequence[int] = ()

    @property
    def stores(self) -> bool:
        """Whether its results are stored."""
        return self.name in KERNELS or self.name.startswith(_REDUCTIONS)


@dataclass(frozen=True)
class TracedArray:
    """An array of a trace.

    Args:
        num_bytes: over all devices together, each part once; 0 of what is on the host.
        placed: by how much a constraint splits each dim; None: as the dim is split anyway.
        order: the numbers of the dims, the major one in memory first; empty: the compiler chooses.
        viewed: the number of the array that it is, transposed.
    """

    dims: Dims
    num_bytes: int
    placed: tuple[int | None, ...] | None = None
    order: tuple[int, ...] = ()
    viewed: int | None = None


@dataclass
class _Body:
    """The steps of a function, or of a loop's body, and the numbers of the leaves it lays out."""

    steps: list[Step] = field(default_factory=list)
    gathered: list[int] = field(default_factory=list)


class StepWalker(Walker):
    """Lists a jaxpr's equations with the arrays that they read and make.

    Args:
        leaves: what the step takes, with shardings, the state's first.

    Attributes:
        arrays: by number.
        shards: dims, and among how many devices each is split.
        body: the steps so far.
        inner: of the loop that was followed last, until it is noted.
        is_tpu: whether the devices are TPUs, whose compilers choose the order of loops' arrays.
    """

    def __init__(self, record: Record, leaves: Sequence[Any]) -> None:
        loops = {name: _in_loop(HANDLERS[name]) for name in LOOPS}
        super().__init__(record, {**HANDLERS, **loops, "shard_map": _shard_map})
        self.arrays: list[TracedArray] = []
        self.shards: list[tuple[Dim, int]] = []
        self.body, self.inner = _Body(), _Body()
        self.leaves = leaves
        self.is_tpu = leaves[0].sharding.mesh.devices.flat[0].platform == "tpu"
        self._laid_out: dict[int, int] = {}

    def numbered(
        self,
        value: Value,
        aval: Any,
        placed: tuple[int | None, ...] | None = None,
        order: tuple[int, ...] = (),
    ) -> Value:
        """Return a value as a new array."""
        is_on_host = getattr(aval, "memory_space", None) == jax.memory.Space.Host
        num_bytes = 0 if is_on_host else _bytes_of_aval(aval)
        self.arrays.append(TracedArray(value.dims, num_bytes, placed, order))
        return replace(value, array=len(self.arrays) - 1)

    def split(self, dims: Dims, counts: Iterable[int | None]) -> None:
        """Note among how many devices dims are split."""
        self.shards += [
            (dim, count) for dim, count in zip(dims, counts, strict=False) if dim and count
        ]

    def note(self, equation: Any, operands: list[Value], results: list[Value]) -> list[Value]:
        """Add a step for an equation."""
        name, inner, self.inner = equation.primitive.name, self.inner, _Body()
        placed = None
        if name == "optimization_barrier":
            return operands
        if name == "sharding_constraint":
            sharding = equation.params["sharding"]
            if getattr(sharding, "mesh", None) is not None:
                sizes = sharding.mesh.shape
                # Over these axes only parameters are split, or what is saved; not what is computed.
                own = [None if _are_of_parameters(axes) else axes for axes in sharding.spec]
                self.split(operands[0].dims, counts_of(own, sizes))
                placed = counts_of(sharding.spec, sizes)
        if name == "shard_map" or self.is_call(equation):
            return results
        if name in SAME_BYTES and placed is None:
            array = operands[0].array
            if name == "transpose" and array >= 0:
                array = self._transposed(array, equation.params["permutation"])
            return [replace(results[0], array=array)]
        if name not in self._handlers:
            results = [self._with_rows(value, operands) for value in results]
        made = [
            self.numbered(
                value,
                var.aval,
                self._stacked(value) if inner.steps else placed,
                self._order(equation, value, operands),
            )
            for value, var in zip(results, equation.outvars, strict=True)
        ]
        if name == "sharding_constraint" and self._is_laid_out(operands[0], equation):
            self.body.gathered += operands[0].sources
            self.arrays[-1] = replace(self.arrays[-1], num_bytes=2 * self.arrays[-1].num_bytes)
        if name == "gather" and _bytes_of_aval(equation.invars[0].aval) <= _SMALL_TABLE:
            name = _FUSED_GATHER
        reads, makes = ([self.base(value) for value in values] for values in (operands, made))
        if inner.steps:
            reads = [*map(self._in_order, operands), *self._before_loop(inner.gathered)]
        stacks = makes[_num_carried(equation, operands, made) :]
        self.body.steps.append(Step(name, reads, makes, inner.steps, stacks))
        return made

    def base(self, value: Value) -> int:
        """Return the number of the array that a value is, or is a transpose of."""
        viewed = self.arrays[value.array].viewed if value.array >= 0 else None
        return value.array if viewed is None else viewed

    def _transposed(self, number: int, permutation: Sequence[int]) -> int:
        """Return the number of an array's transpose, which is the same bytes."""
        array = self.arrays[number]
        if len(array.order) != len(permutation):  # not known, or of another shape since
            return number
        turned = tuple(permutation.index(dim) for dim in array.order)
        viewed = number if array.viewed is None else array.viewed
        self.arrays.append(replace(array, order=turned, viewed=viewed))
        return len(self.arrays) - 1

    def _order(self, equation: Any, result: Value, operands: Sequence[Value]) -> tuple[int, ...]:
        """Return the order of a result's dims in memory, where it is known.

        XLA swaps a product's operands for a transpose behind it, but not where one operand has
        several dims that are not summed over, as the queries of grouped attention have. What is
        elementwise lies as an operand.
        """
        name, shape = equation.primitive.name, self.shape(result)
        if name == "dot_general":
            num_batch_dims = len(equation.params["dimension_numbers"][1][0])
            is_known = 0 < num_batch_dims < len(shape) - 2 and not self.is_tpu
            return tuple(range(len(shape))) if is_known else ()
        if name in LOOPS:
            order = self.arrays[result.array].order if result.array >= 0 else ()
            return (0, *(dim + 1 for dim in order)) if 0 < len(order) < len(shape) else ()
        if Step(name, (), ()).stores:
            return ()
        alike = (self._known_order(one) for one in operands if self.shape(one) == shape)
        return next(filter(None, alike), ())

    def _known_order(self, value: Value) -> tuple[int, ...]:
        """Return the order of a value's dims; empty: not known, or it has another shape since."""
        order = self.arrays[value.array].order if value.array >= 0 else ()
        return order if len(order) == len(value.dims) else ()

    def _in_order(self, operand: Value) -> int:
        """Return a loop's operand in the order of its dims: a copy where it lies otherwise."""
        number, shape = self.base(operand), self.shape(operand)
        moved = [dim for dim in self._known_order(operand) if shape[dim] > 1]
        if moved == sorted(moved):
            return number
        self.arrays.append(replace(self.arrays[number], order=()))
        self.body.steps.append(Step(LAID_OUT, [number], [len(self.arrays) - 1]))
        return len(self.arrays) - 1

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
            self.arrays.append(TracedArray((), bytes_of_leaf(self.leaves[number])))
            self._laid_out[number] = len(self.arrays) - 1
            self.body.steps.append(Step(LAID_OUT, [], [self._laid_out[number]]))
        return [self._laid_out[number] for number in gathered]

    def _with_rows(self, result: Value, operands: list[Value]) -> Value:
        """Return the result of an unknown operation, with the rows of an operand that has as many.

        Else windows' maxima and decompositions of matrices would be of all rows on each device.
        """
        rows = self.shape(result)[:1]
        alike = [value.dims[0] for value in operands if self.shape(value)[:1] == rows != ()]
        return result.with_dims((alike[0], *result.dims[1:])) if alike else result

    def _stacked(self, value: Value) -> tuple[int | None, ...] | None:
        """Return how a loop's result is split where each turn's is placed by a constraint.

        What only changes a parameter's type lies as the parameter.
        """
        leaves = [self.leaves[number] for number in value.sources]
        if len(leaves) == 1 and leaves[0].shape == self.shape(value):
            return counts_of(leaves[0].sharding.spec, leaves[0].sharding.mesh.shape)
        turn = self.arrays[value.array] if value.array >= 0 else None
        if turn is None or turn.placed is None or len(turn.dims) == len(value.dims):
            return None
        return (1, *turn.placed)


def _num_carried(equation: Any, operands: Sequence[Value], results: Sequence[Value]) -> int:
    """Return how many of the first results are no stacks of a loop's turns."""
    if equation.primitive.name != "scan":
        return len(results)
    ranks = [[len(value.dims) for value in some] for some in (operands, results)]
    return scan_sizes(equation.params["jaxpr"], *ranks)[1]


def _bytes_of_aval(aval: Any) -> int:
    itemsize = getattr(getattr(aval, "dtype", None), "itemsize", 4)
    return int(math.prod(np.shape(aval)) * itemsize)


def _are_of_parameters(axes: Any) -> bool:
    """Return whether a dim is split over the axes of parameters and no others."""
    names = {axes} if isinstance(axes, str) else set(axes) if isinstance(axes, tuple) else set()
    return bool(names) and names <= {FSDP_AXIS, MODEL_AXIS}


def counts_of(spec: Iterable[Any], sizes: Mapping[str, int]) -> tuple[int | None, ...]:
    """Return among how many devices each dim is split; None where the compiler may choose."""

    def count(axes: Any) -> int | None:
        if axes is PartitionSpec.UNCONSTRAINED:
            return None
        names = axes if isinstance(axes, tuple) else () if axes is None else (axes,)
        return math.prod(sizes[axis] for axis in names)

    return tuple(map(count, spec))


def _in_loop(handler: Handler) -> Handler:
    def follow(walker: Any, *args: Any) -> list[Value]:
        outside, walker.body = walker.body, _Body()
        results = handler(walker, *args)
        walker.inner, walker.body = walker.body, outside
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
        walker.split(value.dims, counts_of(spec, sizes))
    inside = getattr(params["jaxpr"], "jaxpr", params["jaxpr"])  # closed in later versions of JAX
    parts = [
        replace(value, dims=crossing(value.dims, var.aval.shape, spec))
        for value, var, spec in zip(operands, inside.invars, params["in_specs"], strict=True)
    ]
    made = walker.walk(inside, [], parts)
    for part, shape, spec in zip(made, shapes, params["out_specs"], strict=True):
        alike = [value for value in operands if walker.shape(value) == shape]
        dims = alike[0].dims if alike else crossing(part.dims, shape, spec)
        walker.split(dims, counts_of(spec, sizes))
        results.append(replace(part, dims=dims, kind=Kind.DATA))
    return results


def bytes_of_leaf(leaf: Any) -> int:
    """Return the bytes of a shape with a sharding on each device."""
    shape: tuple[int, ...] = leaf.sharding.shard_shape(leaf.shape)
    return math.prod(shape) * int(leaf.dtype.itemsize)
