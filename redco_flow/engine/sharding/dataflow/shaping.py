"""Primitives that move, cut and join dims without computing anything."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from redco_flow.engine.sharding.dataflow.trace import SIBLINGS, Handler, Walker
from redco_flow.engine.sharding.dataflow.values import Dim, Dims, Fact, Value, join_values

Shape = tuple[int, ...]
Shapes = list[Shape]
Params = dict[str, Any]


def _reshape(walker: Walker, params: Params, operands: list[Value], shapes: Shapes) -> list[Value]:
    (value, *_), (shape,) = operands, shapes
    if 0 in shape:
        return [value.with_dims(walker.atoms.new_dims(shape))]
    dims: list[Dim] = []
    for inside, outside in _blocks(walker.shape(value), shape):
        merged = tuple(atom for position in inside for atom in value.dims[position])
        cut = walker.atoms.regroup(merged, [shape[position] for position in outside])
        if cut is None:
            cut = walker.atoms.new_dims(shape[position] for position in outside)
            walker.record.add_fact(Fact.MIXED, merged, *cut)
        dims += cut
    return [value.with_dims(tuple(dims))]


def _blocks(before: Shape, after: Shape) -> list[tuple[list[int], list[int]]]:
    """Pair the smallest runs of dims that have the same number of elements."""
    blocks, i, j = [], 0, 0
    while i < len(before) or j < len(after):
        inside, outside = [], []
        if i < len(before):
            inside.append(i)
            i += 1
        elif j < len(after):
            outside.append(j)
            j += 1
        while (left := math.prod(before[k] for k in inside)) != (
            right := math.prod(after[k] for k in outside)
        ):
            if left < right:
                inside.append(i)
                i += 1
            else:
                outside.append(j)
                j += 1
        blocks.append((inside, outside))
    return blocks


def _transpose(
    walker: Walker, params: Params, operands: list[Value], shapes: Shapes
) -> list[Value]:
    return [_pick(operands[0], params["permutation"])]


def _squeeze(walker: Walker, params: Params, operands: list[Value], shapes: Shapes) -> list[Value]:
    kept = [i for i in range(len(operands[0].dims)) if i not in params["dimensions"]]
    return [_pick(operands[0], kept)]


def _expand(walker: Walker, params: Params, operands: list[Value], shapes: Shapes) -> list[Value]:
    dims = list(operands[0].dims)
    for position in sorted(params["dimensions"]):
        dims.insert(position, ())
    return [operands[0].with_dims(tuple(dims))]


def _broadcast(
    walker: Walker, params: Params, operands: list[Value], shapes: Shapes
) -> list[Value]:
    dims = list(walker.atoms.new_dims(shapes[0]))
    for position, dim in zip(params["broadcast_dimensions"], operands[0].dims, strict=True):
        if dim:
            dims[position] = dim
    return [operands[0].with_dims(tuple(dims))]


def _slice(walker: Walker, params: Params, operands: list[Value], shapes: Shapes) -> list[Value]:
    (value,), (shape,) = operands, shapes
    strides = params["strides"] or (1,) * len(shape)
    dims = []
    for position, dim in enumerate(value.dims):
        start, stride, size = params["start_indices"][position], strides[position], shape[position]
        edges = _edges(params[SIBLINGS], position, walker.atoms.size(dim))
        if edges and stride == 1 and size != walker.atoms.size(dim):
            sizes = tuple(stop - begin for begin, stop in pairwise(edges))
            dims.append(walker.record.cut(dim, sizes)[edges.index(start)])
        else:
            dims.append(_cut(walker, dim, start, stride, size))
    return [value.with_dims(tuple(dims))]


def _edges(slices: list[Params], position: int, size: int) -> list[int]:
    """Return where slices cut a dim into parts of several sizes; [] where they do not."""
    ranges = {(one["start_indices"][position], one["limit_indices"][position]) for one in slices}
    ranges -= {(0, size)}
    edges = sorted({edge for one in ranges for edge in one})
    is_tiled = sorted(ranges) == list(pairwise(edges)) and edges[:1] + edges[-1:] == [0, size]
    is_even = len({stop - start for start, stop in ranges}) == 1
    return edges if is_tiled and not is_even else []


def _cut(walker: Walker, dim: Dim, start: int, stride: int, size: int) -> Dim:
    """Return a part of a dim: one of equal parts, every n-th index, or a part like no other."""
    atoms, whole = walker.atoms, walker.atoms.size(dim)
    if size == whole:
        return dim
    if size == 0:
        return atoms.new_dim(0)
    if size == 1:
        walker.record.add_fact(Fact.SLICED, dim)
        return ()
    is_part = stride == 1 and whole % size == 0 and start % size == 0
    if is_part and (cut := atoms.regroup(dim, (whole // size, size))):
        walker.record.add_fact(Fact.SLICED, cut[0])
        return cut[1]
    is_comb = stride > 1 and whole == stride * size
    if is_comb and (cut := atoms.regroup(dim, (size, stride))):
        walker.record.add_fact(Fact.SLICED, cut[1])
        return cut[0]
    part = atoms.new_dim(size)
    walker.record.add_fact(Fact.SLICED, dim, part)
    return part


def _split(walker: Walker, params: Params, operands: list[Value], shapes: Shapes) -> list[Value]:
    (value,), axis, start, results = operands, params["axis"], 0, []
    sizes = tuple(shape[axis] for shape in shapes)
    if len(set(sizes)) > 1 and all(sizes):
        parts = walker.record.cut(value.dims[axis], sizes)
        return [value.with_dims(_replaced(value.dims, axis, part)) for part in parts]
    for shape in shapes:
        part = _cut(walker, value.dims[axis], start, 1, shape[axis])
        results.append(value.with_dims(_replaced(value.dims, axis, part)))
        start += shape[axis]
    return results


def _pad(walker: Walker, params: Params, operands: list[Value], shapes: Shapes) -> list[Value]:
    dims = list(operands[0].dims)
    for position, (low, high, inner) in enumerate(params["padding_config"]):
        if low or high or inner:
            dims[position] = walker.atoms.new_dim(shapes[0][position])
            walker.record.add_fact(Fact.SLICED, operands[0].dims[position], dims[position])
    joined = join_values(operands, tuple(dims))
    return [replace(joined, is_token=operands[0].is_token)]


def _concatenate(
    walker: Walker, params: Params, operands: list[Value], shapes: Shapes
) -> list[Value]:
    axis = params["dimension"]
    for other in operands[1:]:
        for position, (one, two) in enumerate(zip(operands[0].dims, other.dims, strict=True)):
            if position != axis:
                walker.record.unify_dims(one, two)
    joined = _join(walker, [value.dims[axis] for value in operands], shapes[0][axis])
    return [_tokens(operands, _replaced(_longest(operands), axis, joined))]


def _join(walker: Walker, parts: Sequence[Dim], size: int) -> Dim:
    """Return what parts make together: (number, part) where they are equal."""
    parts = [part for part in parts if walker.atoms.size(part)] or parts[:1]
    if len(parts) == 1:
        return parts[0]
    part_size, remainder = divmod(size, len(parts))
    if remainder or any(walker.atoms.size(part) != part_size for part in parts):
        whole = walker.atoms.new_dim(size)
        walker.record.add_fact(Fact.JOINED, whole, *parts)
        return whole
    for other in parts[1:]:
        walker.record.unify_dims(parts[0], other)
    number = walker.atoms.new_dim(len(parts))
    walker.record.add_fact(Fact.JOINED, number)
    return number + parts[0]


def _tile(walker: Walker, params: Params, operands: list[Value], shapes: Shapes) -> list[Value]:
    """Put copies side by side; of a dim of size 1 that is what a broadcast does."""
    (value,), dims = operands, []
    for dim, num_copies in zip(value.dims, params["reps"], strict=True):
        number = walker.atoms.new_dim(num_copies)
        if dim:
            walker.record.add_fact(Fact.JOINED, number)
        dims.append(number + dim)
    return [value.with_dims(tuple(dims))]


def _stack(walker: Walker, params: Params, operands: list[Value], shapes: Shapes) -> list[Value]:
    for other in operands[1:]:
        walker.record.unify(operands[0], other)
    dims, number = list(_longest(operands)), walker.atoms.new_dim(len(operands))
    walker.record.add_fact(Fact.JOINED, number)
    dims.insert(params["axis"], number)
    return [_tokens(operands, tuple(dims))]


def _unstack(walker: Walker, params: Params, operands: list[Value], shapes: Shapes) -> list[Value]:
    (value,), axis = operands, params["axis"]
    walker.record.add_fact(Fact.SLICED, value.dims[axis])
    rest = value.dims[:axis] + value.dims[axis + 1 :]
    return [value.with_dims(rest) for _ in shapes]


def _reverse(walker: Walker, params: Params, operands: list[Value], shapes: Shapes) -> list[Value]:
    dims = list(operands[0].dims)
    for position in params["dimensions"]:
        walker.record.add_fact(Fact.SLICED, dims[position])
        dims[position] = walker.atoms.new_dim(shapes[0][position])
    return [operands[0].with_dims(tuple(dims))]


def _keys(walker: Walker, params: Params, operands: list[Value], shapes: Shapes) -> list[Value]:
    """Keep a key's leading dims; its own words are no dims of the model."""
    (value, *_), results = operands, []
    for shape in shapes:
        same = min(len(shape), len(value.dims))
        fresh = walker.atoms.new_dims(shape)
        sizes = walker.shape(value)
        kept = [value.dims[i] if sizes[i] == shape[i] else fresh[i] for i in range(same)]
        results.append(join_values(operands, (*kept, *fresh[same:])))
    return results


def _longest(operands: list[Value]) -> Dims:
    columns = zip(*(value.dims for value in operands), strict=True)
    return tuple(max(column, key=bool) for column in columns)


def _tokens(operands: list[Value], dims: Dims) -> Value:
    joined = join_values(operands, dims)
    data = [value for value in operands if value.kind is joined.kind]
    return replace(joined, is_token=bool(data) and all(value.is_token for value in data))


def _pick(value: Value, positions: Sequence[int]) -> Value:
    return value.with_dims(tuple(value.dims[position] for position in positions))


def _replaced(dims: Dims, position: int, dim: Dim) -> Dims:
    return (*dims[:position], dim, *dims[position + 1 :])


HANDLERS: dict[str, Handler] = {
    "reshape": _reshape,
    "transpose": _transpose,
    "squeeze": _squeeze,
    "expand_dims": _expand,
    "broadcast_in_dim": _broadcast,
    "slice": _slice,
    "split": _split,
    "pad": _pad,
    "concatenate": _concatenate,
    "tile": _tile,
    "stack": _stack,
    "unstack": _unstack,
    "rev": _reverse,
    **dict.fromkeys(
        ("random_wrap", "random_unwrap", "random_bits", "random_split", "random_seed"), _keys
    ),
}
