"""Primitives whose result has its operands' dims, element for element."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from redco_flow.engine.dataflow.atoms import Dim
from redco_flow.engine.dataflow.trace import Handler, Walker
from redco_flow.engine.dataflow.values import Kind, Value, join_values

NAMES = (
    "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh",
    "bessel_i0e", "bessel_i1e", "cbrt", "ceil", "clamp", "conj", "copy", "cos", "cosh",
    "digamma", "div", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt",
    "imag", "integer_pow", "is_finite", "le", "lgamma", "log", "log1p", "logistic", "lt", "max",
    "min", "mul", "name", "ne", "neg", "nextafter", "not", "or", "population_count", "pow",
    "random_fold_in", "real", "reduce_precision", "rem", "round", "rsqrt",
    "sharding_constraint", "shift_left", "shift_right_arithmetic", "shift_right_logical",
    "sign", "sin", "sinh", "sqrt", "square", "stop_gradient", "sub", "tan", "tanh",
    "threefry2x32", "xor",
)  # fmt: skip


def follow(
    walker: Walker, params: dict[str, Any], operands: list[Value], shapes: list[tuple[int, ...]]
) -> list[Value]:
    """Learn that operands of the result's shape have the same dims, and so has the result."""
    results = []
    for shape in shapes:
        # Operands of lower rank are scalars: clamp's bounds, select_n's predicate.
        full = [value for value in operands if len(value.dims) == len(shape)]
        dims = tuple(_same(walker, [value.dims[i] for value in full]) for i in range(len(shape)))
        data = [value for value in operands if value.kind is Kind.DATA]
        joined = join_values(operands, dims)
        results.append(replace(joined, is_token=bool(data) and all(v.is_token for v in data)))
    return results


def _same(walker: Walker, dims: list[Dim]) -> Dim:
    """Learn that dims are the same, but for those of size 1, which are broadcast."""
    wide = [dim for dim in dims if dim]
    for other in wide[1:]:
        walker.record.unify_dims(wide[0], other)
    return wide[0] if wide else ()


def follow_selection(
    walker: Walker, params: dict[str, Any], operands: list[Value], shapes: list[tuple[int, ...]]
) -> list[Value]:
    """As `follow`; what is selected is a token whatever selects it."""
    (result,) = follow(walker, params, operands, shapes)
    data = [value for value in operands[1:] if value.kind is Kind.DATA]
    return [replace(result, is_token=bool(data) and all(v.is_token for v in data))]


def _compare(
    walker: Walker, params: dict[str, Any], operands: list[Value], shapes: list[tuple[int, ...]]
) -> list[Value]:
    """As `follow`; tokens compared with the numbers of all rows select rows."""
    (result,) = follow(walker, params, operands, shapes)
    kinds = {value.kind for value in operands}
    is_one_hot = kinds == {Kind.CONSTANT, Kind.DATA} and any(v.is_token for v in operands)
    return [replace(result, is_one_hot=is_one_hot)]


def _convert(
    walker: Walker, params: dict[str, Any], operands: list[Value], shapes: list[tuple[int, ...]]
) -> list[Value]:
    return operands


def follow_each(
    walker: Walker, params: dict[str, Any], operands: list[Value], shapes: list[tuple[int, ...]]
) -> list[Value]:
    """Pass each operand on as the result of the same number."""
    return operands


HANDLERS: dict[str, Handler] = {
    **dict.fromkeys(NAMES, follow),
    "eq": _compare,
    "convert_element_type": _convert,
    "select_n": follow_selection,
    "optimization_barrier": follow_each,
}
