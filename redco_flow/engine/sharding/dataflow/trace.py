"""Walk the jaxpr of a function and record what it does with its parameters' dims.

Each primitive has a small handler in `handlers.py`'s table; one that is not known keeps its dims
replicated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from redco_flow.engine.sharding.dataflow.values import Fact, Kind, Record, Value, join_values

# (walker, parameters of the primitive, operands, shapes of the results) -> results
Handler = Callable[["Walker", dict[str, Any], list[Value], list[tuple[int, ...]]], list[Value]]


# Facts for a slice besides its own parameters: those of all slices of the same array.
SIBLINGS = "siblings"
# Functions with derivatives of their own.
RULE_CALLS = frozenset({"custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"})


class Walker:
    """Follows arrays through jaxprs, its own and those inside.

    Args:
        handlers: by primitive name.
    """

    def __init__(self, record: Record, handlers: dict[str, Handler]) -> None:
        self.record = record
        self.atoms = record.atoms
        self._handlers = handlers

    def walk(self, jaxpr: Jaxpr, consts: Sequence[Value], inputs: Sequence[Value]) -> list[Value]:
        """Return the values of a jaxpr's results."""
        known: dict[Any, Value] = {}
        known.update(zip(jaxpr.constvars, consts, strict=True))
        known.update(zip(jaxpr.invars, inputs, strict=True))

        def read(atom: Any) -> Value:
            return self.constant(_shape(atom)) if isinstance(atom, Literal) else known[atom]

        slices = _slices(jaxpr)
        for equation in jaxpr.eqns:
            operands = [read(atom) for atom in equation.invars]
            shapes = [_shape(var) for var in equation.outvars]
            handler = self._handlers.get(equation.primitive.name)
            if handler is None:
                results = self._unknown(equation, operands, shapes)
            else:
                params = equation.params
                if equation.primitive.name == "slice":
                    params = {**params, SIBLINGS: slices.get(equation.invars[0], [])}
                results = handler(self, params, operands, shapes)
            results = self.note(equation, operands, results)
            for var, value in zip(equation.outvars, results, strict=True):
                # Shifted and clipped ids are ids; what is compared or counted is not.
                known[var] = value if _is_integer(var.aval) else replace(value, is_token=False)
        return [read(atom) for atom in jaxpr.outvars]

    def note(self, equation: Any, operands: list[Value], results: list[Value]) -> list[Value]:
        """Return an equation's results, when they are known."""
        return results

    def is_call(self, equation: Any) -> bool:
        """Say whether the results are those of a jaxpr that an equation wraps."""
        name = equation.primitive.name
        is_unknown = name not in self._handlers
        return name in RULE_CALLS or (is_unknown and _inner_jaxpr(equation) is not None)

    def walk_closed(self, closed: ClosedJaxpr, inputs: Sequence[Value]) -> list[Value]:
        """Return the values of a closed jaxpr's results."""
        return self.walk(closed.jaxpr, self.constants(closed), inputs)

    def constants(self, closed: ClosedJaxpr) -> list[Value]:
        """Return the values of a closed jaxpr's constants."""
        return [self.constant(np.shape(const)) for const in closed.consts]

    def constant(self, shape: tuple[int, ...]) -> Value:
        """Return a value that comes from nowhere."""
        return Value(self.atoms.new_dims(shape))

    def shape(self, value: Value) -> tuple[int, ...]:
        """Return a value's sizes."""
        return tuple(self.atoms.size(dim) for dim in value.dims)

    def _unknown(
        self, equation: Any, operands: list[Value], shapes: list[tuple[int, ...]]
    ) -> list[Value]:
        """Go into a primitive that only wraps a jaxpr; of any other, keep all dims replicated."""
        inner = _inner_jaxpr(equation)
        if inner is not None:
            return self.walk_closed(inner, operands)
        results = [join_values(operands, self.atoms.new_dims(shape)) for shape in shapes]
        for dim in (dim for value in (*operands, *results) for dim in value.dims if dim):
            self.record.add_fact(Fact.OPAQUE, dim)
            self.record.opaque[dim] = equation.primitive.name
        return results


def function_jaxpr(function: Callable[..., Any], params: Any, inputs: Sequence[Any]) -> ClosedJaxpr:
    """Trace `function(params, *inputs)` on shapes.

    Args:
        params: arrays or shapes.
        inputs: trees of arrays or shapes; Python values in them (None, bool, numbers, text) are
            passed as they are.
    """
    leaves, structure = jax.tree.flatten(tuple(inputs))
    is_array = [hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in leaves]
    arrays = [leaf for leaf, given in zip(leaves, is_array, strict=True) if given]

    def call(params: Any, arrays: list[Any]) -> Any:
        remaining = iter(arrays)
        merged = [
            next(remaining) if given else leaf for leaf, given in zip(leaves, is_array, strict=True)
        ]
        return function(params, *jax.tree.unflatten(structure, merged))

    return jax.make_jaxpr(call)(_abstract(params), _abstract(arrays))


def trace_function(
    function: Callable[..., Any], params: Any, inputs: Sequence[Any], handlers: dict[str, Handler]
) -> Record:
    """Follow the dims of `function(params, *inputs)`; see `function_jaxpr`."""
    closed = function_jaxpr(function, params, inputs)
    record = Record()
    walker = Walker(record, handlers)
    num_params = len(jax.tree.leaves(params))
    values = []
    for number, aval in enumerate(closed.in_avals):
        dims = record.atoms.new_dims(aval.shape)
        if number < num_params:
            record.parameters.append(dims)
            values.append(Value(dims, Kind.PARAMETER, sources=frozenset([number])))
        else:
            values.append(Value(dims, Kind.DATA, is_token=_is_integer(aval)))
    record.used = _used_inputs(closed.jaxpr, num_params)
    walker.walk_closed(closed, values)
    return record


def scan_sizes(
    body: ClosedJaxpr, operands: Sequence[int], results: Sequence[int]
) -> tuple[int, int]:
    """Return how many of a scan's operands are constants, and how many it carries.

    Of what is stacked, and of that alone, the body sees one dim less. The parameters that give the
    numbers have other names and types in later versions of JAX.

    Args:
        operands, results: the scan's ranks.
    """
    num_carry = len(results) - _num_stacked(results, body.jaxpr.outvars)
    num_stacks = _num_stacked(operands, body.jaxpr.invars)
    return len(operands) - num_stacks - num_carry, num_carry


def _num_stacked(ranks: Sequence[int], inside: Sequence[Any]) -> int:
    return sum(rank > len(_shape(atom)) for rank, atom in zip(ranks, inside, strict=True))


def _slices(jaxpr: Jaxpr) -> dict[Any, list[dict[str, Any]]]:
    found: dict[Any, list[dict[str, Any]]] = {}
    for equation in jaxpr.eqns:
        if equation.primitive.name == "slice" and _is_variable(equation.invars[0]):
            found.setdefault(equation.invars[0], []).append(equation.params)
    return found


def _abstract(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def _used_inputs(jaxpr: Jaxpr, count: int) -> set[int]:
    read = {atom for equation in jaxpr.eqns for atom in equation.invars if _is_variable(atom)}
    read |= {atom for atom in jaxpr.outvars if _is_variable(atom)}
    return {number for number, var in enumerate(jaxpr.invars[:count]) if var in read}


def _is_variable(atom: Any) -> bool:
    return not isinstance(atom, Literal)


def _inner_jaxpr(equation: Any) -> ClosedJaxpr | None:
    """Return the one jaxpr that takes an equation's operands and gives its results."""
    found = []
    for value in equation.params.values():
        # Later versions of JAX have one class for both.
        if isinstance(value, ClosedJaxpr):
            found.append(value)
        elif isinstance(value, Jaxpr) and not value.constvars:
            found.append(ClosedJaxpr(value, ()))
    if len(found) != 1:
        return None
    (inner,) = found
    takes_same = list(map(_shape, equation.invars)) == list(map(_shape, inner.jaxpr.invars))
    gives_same = list(map(_shape, equation.outvars)) == list(map(_shape, inner.jaxpr.outvars))
    return inner if takes_same and gives_same else None


def _shape(atom: Any) -> tuple[int, ...]:
    return tuple(getattr(atom.aval, "shape", ()))


def _is_integer(aval: Any) -> bool:
    # Keys of random numbers have a dtype that NumPy does not know.
    dtype = getattr(aval, "dtype", None)
    return isinstance(dtype, np.dtype) and np.issubdtype(dtype, np.integer)
