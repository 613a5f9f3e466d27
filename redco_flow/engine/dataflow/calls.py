"""Primitives that run another jaxpr: once, per layer, in a loop, or one of several.

A body is walked once: what goes round a loop has the same dims before and after.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from redco_flow.engine.dataflow.trace import Handler, Walker
from redco_flow.engine.dataflow.values import Fact, Kind, Value, join_values

Shapes = list[tuple[int, ...]]
Params = dict[str, Any]


def _scan(walker: Walker, params: Params, operands: list[Value], shapes: Shapes) -> list[Value]:
    num_consts, num_carry = params["num_consts"], params["num_carry"]
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
    """What goes round is data from the second round on, if anything in the loop is."""
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


HANDLERS: dict[str, Handler] = {
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "custom_jvp_call": _rule_call,
    "custom_vjp_call": _rule_call,
    "custom_vjp_call_jaxpr": _rule_call,
}
