"""The table of all primitives whose dataflow is known."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from redco_flow.engine.sharding.dataflow import indexing, products, shaping
from redco_flow.engine.sharding.dataflow.trace import RULE_CALLS, Handler, Walker, scan_sizes
from redco_flow.engine.sharding.dataflow.values import Dim, Fact, Kind, Value, join_values

Shapes = list[tuple[int, ...]]
Params = dict[str, Any]


def _scan(walker: Walker, params: Params, operands: list[Value], shapes: Shapes) -> list[Value]:
    num_consts, num_carry = scan_sizes(
        params["jaxpr"], [len(value.dims) for value in operands], list(map(len, shapes))
    )
    consts, rest = operands[:num_consts], operands[num_consts:]
    carry, stacked = rest[:num_carry], rest[num_carry:]
    walker.record.add_fact(Fact.LAYER, *(value.dims[0] for value in stacked))
    one_layer = [value.with_dims(value.dims[1:]) for value in stacked]
    carried = _as_carried(carry, operands)
    results = walker.walk_closed(params["jaxpr"], [*consts, *carried, *one_layer])
    _close_loop(walker, carried, results[:num_carry])
    layers = walker.atoms.new_dim(params["length"])
    walker.record.add_fact(Fact.LAYER, layers)
    made = [value.with_dims((layers, *value.dims)) for value in results[num_carry:]]
    return results[:num_carry] + made


def _while(walker: Walker, params: Params, operands: list[Value], shapes: Shapes) -> list[Value]:
    num_cond, num_body = params["cond_nconsts"], params["body_nconsts"]
    cond_consts, rest = operands[:num_cond], operands[num_cond:]
    body_consts, carry = rest[:num_body], rest[num_body:]
    carried = _as_carried(carry, operands)
    walker.walk_closed(params["cond_jaxpr"], [*cond_consts, *carried])
    results = walker.walk_closed(params["body_jaxpr"], [*body_consts, *carried])
    _close_loop(walker, carried, results)
    return results


def _as_carried(carry: list[Value], operands: list[Value]) -> list[Value]:
    """Mark carried values as data, as they are from the second iteration on if any value is."""
    has_data = any(value.kind is Kind.DATA for value in operands)
    if not has_data:
        return carry
    return [replace(value, kind=Kind.DATA, sources=frozenset()) for value in carry]


def _close_loop(walker: Walker, before: list[Value], after: list[Value]) -> None:
    for one, two in zip(before, after, strict=True):
        walker.record.unify(one, two)


def _cond(walker: Walker, params: Params, operands: list[Value], shapes: Shapes) -> list[Value]:
    branches = [walker.walk_closed(branch, operands[1:]) for branch in params["branches"]]
    results = []
    for found in zip(*branches, strict=True):
        for other in found[1:]:
            walker.record.unify(found[0], other)
        results.append(join_values([operands[0], *found], found[0].dims))
    return results


def _rule_call(
    walker: Walker, params: Params, operands: list[Value], shapes: Shapes
) -> list[Value]:
    """Follow a function that has a derivative of its own, forwards."""
    inner = params.get("call_jaxpr") or params["fun_jaxpr"]
    return walker.walk_closed(inner, operands)


CALLS: dict[str, Handler] = {
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    **dict.fromkeys(RULE_CALLS, _rule_call),
}

ELEMENTWISE_NAMES = (
    "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh",
    "bessel_i0e", "bessel_i1e", "cbrt", "ceil", "clamp", "conj", "copy", "cos", "cosh",
    "digamma", "div", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt",
    "imag", "integer_pow", "is_finite", "le", "lgamma", "log", "log1p", "log2", "logistic", "lt",
    "max", "min", "mul", "name", "ne", "neg", "nextafter", "not", "now_or_again",
    "one_minus_square", "or",
    "polynomial", "population_count", "pow", "random_fold_in", "real", "reduce_precision", "rem",
    "round", "rsqrt", "sharding_constraint", "shift_left", "shift_right_arithmetic",
    "shift_right_logical", "sign", "sin", "sinh", "sqrt", "square", "stop_gradient", "sub", "tan",
    "tanh", "threefry2x32", "xor",
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


ELEMENTWISE: dict[str, Handler] = {
    **dict.fromkeys(ELEMENTWISE_NAMES, follow),
    "eq": _compare,
    "convert_element_type": _convert,
    "select_n": follow_selection,
    "optimization_barrier": follow_each,
}

HANDLERS: dict[str, Handler] = {
    **ELEMENTWISE,
    **shaping.HANDLERS,
    **indexing.HANDLERS,
    **products.HANDLERS,
    **products.REDUCTIONS,
    **CALLS,
}
