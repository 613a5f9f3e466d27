"""Compute with kernels that are split over the model shards, knowing along which dim.

The columns of fused kernels are sorted by shard, as their storage is. The product, its bias and
whatever else does not look along the columns run on them as they are; where the function takes the
parts apart, each is cut from every shard's own columns, and nothing moves. Anything else gets the
columns in the user's order, which does move them.

Where several kernels read one array, fused or not, its gradient is reduced once
(`shared_inputs.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from redco_flow.engine.sharding.dataflow.handlers import ELEMENTWISE_NAMES
from redco_flow.engine.sharding.dataflow.trace import function_jaxpr
from redco_flow.engine.sharding.fused_parts import FusedParts
from redco_flow.engine.sharding.shared_inputs import SharedInputs, multiply, shares_inputs
from redco_flow.engine.step.deferred import Deferred, Outcome, bind, run_deferred

# Told of the parameters (by number) whose columns were needed in the user's order.
Tell = Callable[[frozenset[int]], None]
_Results = list[tuple[Any, FusedParts | None]]


def compute_by_shard(
    function: Callable[..., Any], fused: Sequence[FusedParts | None], tell: Tell
) -> Callable[..., Any]:
    """Return `function(params, *inputs)` for parameters that are stored sorted by shard.

    Args:
        function: its inputs are trees of arrays and Python values; those are passed as they are.
        fused: one per leaf of the parameters: of what is split over the model shards, its parts,
            which may be one; None where a leaf is not.
        tell: called while the function is traced.
    """
    if not any(fused):
        return function
    has_parts = any(parts is not None and len(parts.parts) > 1 for parts in fused)

    def computing(params: Any, *inputs: Any) -> Any:
        if not has_parts and not shares_inputs(function_jaxpr(function, params, inputs).jaxpr):
            return function(params, *inputs)
        deferred = [
            None if parts is None else _ByShard(parts, frozenset([number]), tell)
            for number, parts in enumerate(fused)
        ]
        return run_deferred(function, params, jax.tree.leaves(params), deferred, inputs)

    return computing


@dataclass(frozen=True)
class _ByShard(Deferred):
    """An array whose columns are sorted by shard; of one part, they are in the user's order.

    Args:
        sources: the parameters that it is computed from.
    """

    parts: FusedParts
    sources: frozenset[int]
    tell: Tell
    casts_first: ClassVar[bool] = True
    enters_loops: ClassVar[bool] = True

    def use(self, value: Any) -> Any:
        if len(self.parts.parts) == 1:
            return value
        self.tell(self.sources)
        return self.parts.to_logical(value)

    def row(self) -> Deferred | None:
        position = self.parts.position
        return replace(self, parts=self.parts.at(position - 1)) if position else None

    def through(
        self,
        equation: Any,
        values: Sequence[Any],
        deferred: Sequence[Deferred | None],
        shared: SharedInputs,
    ) -> list[Outcome] | None:
        name = equation.primitive.name
        handler = partial(_multiply, shared) if name == "dot_general" else _HANDLERS.get(name)
        found = [how if isinstance(how, _ByShard) else None for how in deferred]
        if handler is None:
            return None
        results = handler(equation, values, [None if how is None else how.parts for how in found])
        if results is None:
            return None
        sources = frozenset[int]().union(*(how.sources for how in found if how))
        return [
            (value, None if parts is None else replace(self, parts=parts, sources=sources))
            for value, parts in results
        ]


def _each_column(
    equation: Any, values: Sequence[Any], fused: Sequence[FusedParts | None]
) -> _Results | None:
    """Keep the order of all operands, if it is one; what has no columns has none to sort."""
    orders = {one for one in fused if one}
    if len(orders) > 1:
        return None
    (parts,) = orders
    shapes = [np.shape(value) for value in values]
    has_columns = [len(shape) > parts.position and shape[parts.position] > 1 for shape in shapes]
    if any(wide and one is None for wide, one in zip(has_columns, fused, strict=True)):
        return None
    return [(value, parts) for value in bind(equation, values)]


def _multiply(
    shared: SharedInputs,
    equation: Any,
    values: Sequence[Any],
    fused: Sequence[FusedParts | None],
) -> _Results | None:
    """Carry the order of one operand's free dim to the result."""
    contracted, batch = equation.params["dimension_numbers"]
    if all(fused):
        return None
    side = 0 if fused[0] else 1
    parts = fused[side]
    taken = {*contracted[side], *batch[side]}
    if parts is None or parts.position in taken:
        return None
    before = [i for i in range(parts.position) if i not in taken]
    others = 0
    if side:
        others = values[0].ndim - len(contracted[0]) - len(batch[0])
    position = len(batch[side]) + others + len(before)
    read, value, kernel = equation.invars[1 - side], values[1 - side], values[side]
    if not shared.has(read) or not all(map(_is_float, values)):
        return [(result, parts.at(position)) for result in bind(equation, values)]

    def product(value: Any, kernel: Any) -> Any:
        (result,) = bind(equation, (value, kernel) if side else (kernel, value))
        return result

    copies = shared.copies(read, value, parts.num_shards)
    result = multiply(product, copies, value, kernel, (parts.position, position))
    return [(result, parts.at(position))]


def _is_float(value: Any) -> bool:
    return bool(jnp.issubdtype(value.dtype, jnp.floating))


def _broadcast(equation: Any, value: Any, parts: FusedParts) -> _Results | None:
    position = equation.params["broadcast_dimensions"][parts.position]
    return [(value, parts.at(position)) for value in bind(equation, [value])]


def _transpose(equation: Any, value: Any, parts: FusedParts) -> _Results | None:
    position = tuple(equation.params["permutation"]).index(parts.position)
    return [(value, parts.at(position)) for value in bind(equation, [value])]


def _squeeze(equation: Any, value: Any, parts: FusedParts) -> _Results | None:
    gone = sum(dim < parts.position for dim in equation.params["dimensions"])
    return [(value, parts.at(parts.position - gone)) for value in bind(equation, [value])]


def _reduce(equation: Any, value: Any, parts: FusedParts) -> _Results | None:
    """A sum or a largest value of all columns is the same in any order."""
    axes = equation.params["axes"]
    gone = sum(axis < parts.position for axis in axes)
    left = None if parts.position in axes else parts.at(parts.position - gone)
    return [(value, left) for value in bind(equation, [value])]


def _reshape(equation: Any, value: Any, parts: FusedParts) -> _Results | None:
    """Let dims beside the columns change; cut the columns where no part is cut across."""
    sizes = tuple(equation.params["new_sizes"])
    if 0 in sizes:
        return None
    run = _same_run(value.shape, parts.position, sizes)
    if run is None:
        return None
    start, stop = run
    inner = math.prod(sizes[start + 1 : stop])
    if all(size // parts.num_shards % inner == 0 for size in parts.parts):
        smaller = replace(parts, position=start, parts=tuple(size // inner for size in parts.parts))
        return [(value.reshape(sizes), smaller)]
    if parts.is_even and sizes[start] == len(parts.parts):
        return [(parts.stack(value).reshape(sizes), None)]
    return None


def _same_run(before: Sequence[int], position: int, after: Sequence[int]) -> tuple[int, int] | None:
    """Return the new dims [start, stop) that an old one became; None where it met others."""
    outer, size = math.prod(before[:position]), before[position]
    start = 0
    while start < len(after) and (math.prod(after[:start]) != outer or after[start] == 1):
        start += 1
    stop = start
    while stop < len(after) and math.prod(after[start:stop]) < size:
        stop += 1
    return (start, stop) if math.prod(after[start:stop]) == size else None


def _slice(equation: Any, value: Any, parts: FusedParts) -> _Results | None:
    params = equation.params
    position, strides = parts.position, params["strides"]
    start, stop = params["start_indices"][position], params["limit_indices"][position]
    if (start, stop) == (0, parts.size) and (strides is None or strides[position] == 1):
        return [(value, parts) for value in bind(equation, [value])]
    is_else_whole = all(
        i == position or (0, size) == (params["start_indices"][i], params["limit_indices"][i])
        for i, size in enumerate(value.shape)
    )
    if not is_else_whole or (strides is not None and any(stride != 1 for stride in strides)):
        return None
    taken = _take(parts, value, int(start), int(stop))
    return None if taken is None else [taken]


def _split(equation: Any, value: Any, parts: FusedParts) -> _Results | None:
    params = equation.params
    if params["axis"] != parts.position:
        return [(value, parts) for value in bind(equation, [value])]
    taken, start = [], 0
    for size in params["sizes"]:
        taken.append(_take(parts, value, start, start + int(size)))
        start += int(size)
    found = [one for one in taken if one is not None]
    return found if len(found) == len(taken) else None


def _take(
    parts: FusedParts, value: Any, start: int, stop: int
) -> tuple[Any, FusedParts | None] | None:
    """Return the columns [start, stop) if they are whole parts: one is ready, more are fused."""
    edges = [sum(parts.parts[:number]) for number in range(len(parts.parts) + 1)]
    if start not in edges or stop not in edges:
        return None
    first, last = edges.index(start), edges.index(stop)
    fewer = replace(parts, parts=parts.parts[first:last])
    return parts.take(value, first, last), fewer if last - first > 1 else None


def _of_one(handler: Callable[[Any, Any, FusedParts], _Results | None]) -> _Handler:
    """Let a handler of operations with one operand be a handler like the others."""

    def handle(
        equation: Any, values: Sequence[Any], fused: Sequence[FusedParts | None]
    ) -> _Results | None:
        return None if fused[0] is None else handler(equation, values[0], fused[0])

    return handle


_Handler = Callable[[Any, Sequence[Any], Sequence[FusedParts | None]], _Results | None]
_HANDLERS: dict[str, _Handler] = {
    **dict.fromkeys((*ELEMENTWISE_NAMES, "convert_element_type", "select_n"), _each_column),
    **dict.fromkeys(
        ("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or"),
        _of_one(_reduce),
    ),
    "broadcast_in_dim": _of_one(_broadcast),
    "transpose": _of_one(_transpose),
    "squeeze": _of_one(_squeeze),
    "reshape": _of_one(_reshape),
    "slice": _of_one(_slice),
    "split": _of_one(_split),
}
