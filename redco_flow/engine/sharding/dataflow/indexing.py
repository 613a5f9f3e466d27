"""Primitives that select by index: lookups of rows, slices at computed positions, scatters."""

from __future__ import annotations

from typing import Any

from redco_flow.engine.sharding.dataflow.trace import Handler, Walker
from redco_flow.engine.sharding.dataflow.values import (
    Dim,
    Dims,
    Fact,
    Kind,
    Lookup,
    Value,
    join_values,
)

Shapes = list[tuple[int, ...]]
Params = dict[str, Any]


def _gather(walker: Walker, params: Params, operands: list[Value], shapes: Shapes) -> list[Value]:
    operand, indices = operands
    numbers, sizes = params["dimension_numbers"], params["slice_sizes"]
    batching = tuple(numbers.operand_batching_dims)
    for one, two in zip(batching, numbers.start_indices_batching_dims, strict=True):
        walker.record.unify_dims(operand.dims[one], indices.dims[two])
    collapsed = tuple(numbers.collapsed_slice_dims)
    kept = [i for i in range(len(operand.dims)) if i not in collapsed + batching]
    rows = tuple(_kept_part(walker, operand.dims[i], sizes[i]) for i in kept)
    _note_selection(walker, operand, indices, [operand.dims[i] for i in collapsed], rows)
    offsets = dict(zip(numbers.offset_dims, rows, strict=True))
    batch = iter(indices.dims[:-1])
    dims = tuple(offsets[i] if i in offsets else next(batch) for i in range(len(shapes[0])))
    return [join_values(operands, dims)]


def _kept_part(walker: Walker, dim: Dim, size: int) -> Dim:
    if size == walker.atoms.size(dim):
        return dim
    walker.record.add_fact(Fact.SELECTED, dim)
    return walker.atoms.new_dim(size)


def _note_selection(
    walker: Walker, operand: Value, indices: Value, selected: list[Dim], rows: Dims
) -> None:
    if operand.kind is Kind.PARAMETER and len(selected) == 1:
        by_tokens = indices.is_token
        lookup = Lookup(operand.sources, by_tokens, selected[0], rows)
        walker.record.events.append(lookup)
        if not by_tokens:
            walker.record.add_fact(Fact.SELECTED, *selected)
    else:
        walker.record.add_fact(Fact.SELECTED, *selected)


def _dynamic_slice(
    walker: Walker, params: Params, operands: list[Value], shapes: Shapes
) -> list[Value]:
    operand, *starts = operands
    dims = tuple(
        _kept_part(walker, dim, size) for dim, size in zip(operand.dims, shapes[0], strict=True)
    )
    return [join_values([operand, *starts], dims)]


def _dynamic_update(
    walker: Walker, params: Params, operands: list[Value], shapes: Shapes
) -> list[Value]:
    operand, update, *_ = operands
    for whole, part in zip(operand.dims, update.dims, strict=True):
        if walker.atoms.size(whole) == walker.atoms.size(part):
            walker.record.unify_dims(whole, part)
        else:
            walker.record.add_fact(Fact.SELECTED, whole, part)
    return [join_values(operands, operand.dims)]


def _scatter(walker: Walker, params: Params, operands: list[Value], shapes: Shapes) -> list[Value]:
    operand, indices, updates = operands
    numbers = params["dimension_numbers"]
    inserted = tuple(numbers.inserted_window_dims)
    batching = tuple(numbers.operand_batching_dims)
    window = [i for i in range(len(operand.dims)) if i not in inserted + batching]
    for position, update_position in zip(window, numbers.update_window_dims, strict=True):
        whole, part = operand.dims[position], updates.dims[update_position]
        if walker.atoms.size(whole) == walker.atoms.size(part):
            walker.record.unify_dims(whole, part)
        else:
            walker.record.add_fact(Fact.SELECTED, whole, part)
    walker.record.add_fact(Fact.SELECTED, *(operand.dims[i] for i in inserted))
    for one, two in zip(batching, numbers.scatter_indices_batching_dims, strict=True):
        walker.record.unify_dims(operand.dims[one], indices.dims[two])
    scattered = [i for i in range(len(updates.dims)) if i not in numbers.update_window_dims]
    for position, index_dim in zip(scattered, indices.dims[:-1], strict=True):
        walker.record.unify_dims(updates.dims[position], index_dim)
    return [join_values(operands, operand.dims)]


HANDLERS: dict[str, Handler] = {
    "gather": _gather,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update,
    **dict.fromkeys(
        ("scatter", "scatter-add", "scatter_add", "scatter-mul", "scatter_mul", "scatter_max",
         "scatter_min", "scatter-max", "scatter-min", "scatter_sub", "scatter-sub"),
        _scatter,
    ),
}  # fmt: skip
