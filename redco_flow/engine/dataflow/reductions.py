"""Primitives that reduce, sort, accumulate or number the indices of a dim."""

from __future__ import annotations

from typing import Any

from redco_flow.engine.dataflow.trace import Handler, Walker
from redco_flow.engine.dataflow.values import Fact, Value, join_values

Shapes = list[tuple[int, ...]]
Params = dict[str, Any]


def _reduce(walker: Walker, params: Params, operands: list[Value], shapes: Shapes) -> list[Value]:
    """Drop the reduced dims; a sum over a split dim is one number per row to exchange."""
    dims = tuple(dim for place, dim in enumerate(operands[0].dims) if place not in params["axes"])
    return [join_values(operands, dims) for _ in shapes]


def _accumulate(
    walker: Walker, params: Params, operands: list[Value], shapes: Shapes
) -> list[Value]:
    walker.record.add_fact(Fact.SORTED, operands[0].dims[params["axis"]])
    return [join_values(operands, operands[0].dims)]


def _sort(walker: Walker, params: Params, operands: list[Value], shapes: Shapes) -> list[Value]:
    for other in operands[1:]:
        walker.record.unify(operands[0], other)
    walker.record.add_fact(Fact.SORTED, operands[0].dims[params["dimension"]])
    return [join_values(operands, operands[0].dims) for _ in shapes]


def _top_k(walker: Walker, params: Params, operands: list[Value], shapes: Shapes) -> list[Value]:
    dims, axis = list(operands[0].dims), params.get("axis", -1)
    walker.record.add_fact(Fact.SORTED, dims[axis])
    dims[axis] = walker.atoms.new_dim(shapes[0][axis])
    return [join_values(operands, tuple(dims)) for _ in shapes]


def _iota(walker: Walker, params: Params, operands: list[Value], shapes: Shapes) -> list[Value]:
    return [walker.constant(shapes[0])]


HANDLERS: dict[str, Handler] = {
    **dict.fromkeys(
        ("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or",
         "reduce_xor", "argmax", "argmin"),
        _reduce,
    ),
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), _accumulate),
    "sort": _sort,
    "top_k": _top_k,
    "iota": _iota,
}  # fmt: skip
