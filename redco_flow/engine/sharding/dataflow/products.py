"""Primitives that multiply and sum: where the two rules apply.

Data times parameters is a product; data times data is attention, routing or a dispatch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from redco_flow.engine.sharding.dataflow.trace import Handler, Walker
from redco_flow.engine.sharding.dataflow.values import Dims, Fact, Kind, Lookup, Value, join_values

Shapes = list[tuple[int, ...]]
Params = dict[str, Any]
Places = tuple[int, ...]


def _dot_general(
    walker: Walker, params: Params, operands: list[Value], shapes: Shapes
) -> list[Value]:
    left, right = operands
    contracted, batch = params["dimension_numbers"]
    return [_multiply(walker, left, right, contracted, batch)]


def _multiply(
    walker: Walker,
    left: Value,
    right: Value,
    contracted: tuple[Places, Places],
    batch: tuple[Places, Places],
) -> Value:
    for one, two in (contracted, batch):
        for i, j in zip(one, two, strict=True):
            walker.record.unify_dims(left.dims[i], right.dims[j])
    summed = tuple(left.dims[i] for i in contracted[0])
    shared = tuple(left.dims[i] for i in batch[0])
    left_free = _free(left, contracted[0], batch[0])
    right_free = _free(right, contracted[1], batch[1])
    result = join_values([left, right], (*shared, *left_free, *right_free))
    kinds = {left.kind, right.kind}
    if kinds == {Kind.DATA, Kind.PARAMETER}:
        data, weights = (left, right) if left.kind is Kind.DATA else (right, left)
        outputs = right_free if data is left else left_free
        if data.is_one_hot and len(summed) == 1:
            walker.record.events.append(Lookup(weights.sources, True, summed[0], outputs))
            return result
        bit = walker.record.add_product(weights.sources, data, summed, outputs)
        return replace(result, events=result.events | bit)
    if kinds == {Kind.DATA}:
        walker.record.add_fact(Fact.BATCH, *shared)
    # Summing with nothing left over is an element-wise product and a sum, cheap if split.
    if kinds != {Kind.PARAMETER} and any(left_free + right_free):
        walker.record.add_fact(Fact.ATTENDED, *summed)
    return result


def _free(value: Value, contracted: Places, batch: Places) -> Dims:
    taken = {*contracted, *batch}
    return tuple(dim for position, dim in enumerate(value.dims) if position not in taken)


def _ragged_dot(
    walker: Walker, params: Params, operands: list[Value], shapes: Shapes
) -> list[Value]:
    left, right, groups, *_ = operands
    numbers = params["ragged_dot_dimension_numbers"]
    contracted, batch = numbers.dot_dimension_numbers
    expert_places = tuple(numbers.rhs_group_dimensions)
    walker.record.add_fact(Fact.EXPERTS, *(right.dims[i] for i in expert_places), *groups.dims)
    # One expert's part of the kernels is what each row meets.
    kept = [i for i in range(len(right.dims)) if i not in expert_places]
    positions = {position: number for number, position in enumerate(kept)}
    one_expert = right.with_dims(tuple(right.dims[i] for i in kept))
    moved = (contracted[0], tuple(positions[i] for i in contracted[1]))
    moved_batch = (batch[0], tuple(positions[i] for i in batch[1]))
    result = _multiply(walker, left, one_expert, moved, moved_batch)
    if len(result.dims) != len(shapes[0]):
        # Other modes put a dim of groups first; nothing is known of where it goes.
        dims = walker.atoms.new_dims(shapes[0])
        walker.record.add_fact(Fact.MIXED, *dims)
        return [result.with_dims(dims)]
    return [result]


def _convolve(walker: Walker, params: Params, operands: list[Value], shapes: Shapes) -> list[Value]:
    data, kernel = operands
    numbers = params["dimension_numbers"]
    features, batch = data.dims[numbers.lhs_spec[1]], data.dims[numbers.lhs_spec[0]]
    outputs, inputs = kernel.dims[numbers.rhs_spec[0]], kernel.dims[numbers.rhs_spec[1]]
    groups = params["feature_group_count"]
    dims = list(walker.atoms.new_dims(shapes[0]))
    dims[numbers.out_spec[0]] = batch
    walker.record.add_fact(Fact.SLICED, *(data.dims[i] for i in numbers.lhs_spec[2:]))
    result = join_values(operands, tuple(dims))
    if groups == 1:
        walker.record.unify_dims(features, inputs)
        dims[numbers.out_spec[1]] = outputs
        if data.kind is Kind.DATA and kernel.kind is Kind.PARAMETER:
            bit = walker.record.add_product(kernel.sources, data, (features,), (outputs,))
            result = replace(result, events=result.events | bit)
    elif walker.atoms.size(outputs) == walker.atoms.size(features) == groups:
        # One kernel per feature: element-wise along the features.
        walker.record.unify_dims(features, outputs)
        dims[numbers.out_spec[1]] = features
    else:
        walker.record.add_fact(Fact.MIXED, features, outputs)
    return [result.with_dims(tuple(dims))]


HANDLERS: dict[str, Handler] = {
    "dot_general": _dot_general,
    "ragged_dot_general": _ragged_dot,
    "conv_general_dilated": _convolve,
}


def _reduce(walker: Walker, params: Params, operands: list[Value], shapes: Shapes) -> list[Value]:
    """Drop the reduced dims; a sum over a split dim is one number per row to exchange."""
    dims = tuple(
        dim for position, dim in enumerate(operands[0].dims) if position not in params["axes"]
    )
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


REDUCTIONS: dict[str, Handler] = {
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
