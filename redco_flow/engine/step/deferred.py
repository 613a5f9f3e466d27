"""Materialize parameters at their first use: per-layer all-gather, LoRA, dequantization.

The function is traced, and each deferred parameter stays as it is until an operation needs it:
inside a scan over layers that is one layer's part, and inside what is rematerialised it is made
again for the backward pass.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import jax
from jax.extend import core

from redco_flow.engine.sharding.dataflow.trace import scan_sizes
from redco_flow.engine.sharding.mesh import equations_inside
from redco_flow.engine.sharding.shared_inputs import SharedInputs

_CALLS = ("jit", "pjit", "closed_call", "core_call")
_REMATS = ("remat", "remat2", "checkpoint")
# What is run by running what it holds.
_OPENED = (*_CALLS, *_REMATS, "scan", "cond")
# A value and how it becomes ready; None where it is.
Outcome = tuple[Any, "Deferred | None"]


class Deferred(ABC):
    """A conversion from a stored value to the array that the function expects."""

    # Whether a cast of the value may come first.
    casts_first: ClassVar[bool]
    # Whether a loop takes it as it is, and not ready.
    enters_loops: ClassVar[bool] = False

    @abstractmethod
    def use(self, value: Any) -> jax.Array:
        """Make it ready; `value` is an array or a tree of them."""

    @abstractmethod
    def row(self) -> Deferred | None:
        """Return how one entry along the first dim becomes ready; None: all must be at once."""

    def through(
        self,
        equation: Any,
        values: Sequence[Any],
        deferred: Sequence[Deferred | None],
        shared: SharedInputs,
    ) -> list[Outcome] | None:
        """Return an operation's results on values that are not ready; None: it needs them ready.

        Args:
            values, deferred: of the operands; at least one is deferred in this way.
            shared: of the jaxpr that contains the operation.
        """
        return None


class Keeping:
    """A policy for residuals of the backward pass; this one saves what JAX saves by default.

    Of nested `jax.checkpoint` JAX asks the outermost alone what is kept. Where `surround` puts one
    around a function, `again` must see to those inside.
    """

    # Whether `surround` rematerialises.
    decides: ClassVar[bool] = False

    def surround(self, function: Callable[..., Any], *, in_loop: bool) -> Callable[..., Any]:
        """Return the whole function, or the body of a scan over deferred parts, to be run."""
        return function

    def again(
        self, function: Callable[..., Any], *, is_surrounded: bool, **options: Any
    ) -> Callable[..., Any]:
        """Return what the function itself rematerialises.

        Args:
            is_surrounded: whether it stands right inside of what `surround` returned, and not
                inside of another part that is rematerialised.
            options: of `jax.checkpoint`.
        """
        return jax.checkpoint(function, **options)

    def results(self, values: list[Any]) -> list[Any]:
        """Return the results of a scan that stands right inside of what `surround` returned."""
        return values


def run_deferred(
    function: Callable[..., Any],
    shapes: Any,
    values: Sequence[Any],
    deferred: Sequence[Deferred | None],
    inputs: Sequence[Any],
    *,
    keeping: Keeping | None = None,
) -> Any:
    """Return what `function(params, *inputs)` returns.

    Args:
        shapes: the tree of arrays or shapes that `params` would be.
        values: one per leaf of it: the array, or what its `deferred` makes it of.
        deferred: one per leaf; None where the value is the array.
        inputs: trees of arrays and Python values; those are passed as they are.
        keeping: what is kept for the backward pass.
    """
    leaves, structure = jax.tree.flatten(tuple(inputs))
    arrays = [leaf for leaf in leaves if hasattr(leaf, "dtype")]

    def on_arrays(params: Any, arrays: list[Any]) -> Any:
        given = iter(arrays)
        filled = [next(given) if hasattr(leaf, "dtype") else leaf for leaf in leaves]
        return function(params, *jax.tree.unflatten(structure, filled))

    jaxpr, results = jax.make_jaxpr(on_arrays, return_shape=True)(shapes, arrays)
    keeping = keeping or Keeping()
    evaluator = _Evaluator(keeping, is_surrounded=keeping.decides)
    splits = [*deferred, *[None] * len(arrays)]
    run = keeping.surround(
        lambda *values: _ready(evaluator.evaluate(jaxpr, values, splits)), in_loop=False
    )
    return jax.tree.unflatten(jax.tree.structure(results), run(*values, *arrays))


class _Evaluator:
    """Runs jaxprs on values of which some are deferred."""

    def __init__(self, keeping: Keeping, *, is_surrounded: bool) -> None:
        self._keeping = keeping
        self._is_surrounded = is_surrounded

    def evaluate(
        self,
        jaxpr: core.ClosedJaxpr,
        values: Sequence[Any],
        deferred: Sequence[Deferred | None],
    ) -> list[Outcome]:
        env = _Environment(jaxpr, values, deferred)
        for equation in jaxpr.jaxpr.eqns:
            if any(env.deferred(v) for v in equation.invars):
                outs = self._on_deferred(equation, env)
            elif self._is_surrounded and equation.primitive.name in _OPENED and _holds(equation):
                outs = self._open(equation, env)
            else:
                outs = _as_ready(bind(equation, [env.value(v) for v in equation.invars]))
            env.write(equation.outvars, outs)
        return [env.outcome(v) for v in jaxpr.jaxpr.outvars]

    def _on_deferred(self, equation: Any, env: _Environment) -> list[Outcome]:
        name = equation.primitive.name
        if name in _OPENED and (name != "cond" or (self._is_surrounded and _holds(equation))):
            return self._open(equation, env)
        found = [env.deferred(v) for v in equation.invars]
        values = [env.value(v) for v in equation.invars]
        if name == "convert_element_type" and found[0] is not None and found[0].casts_first:
            return [(value, found[0]) for value in bind(equation, values)]
        how = next(how for how in found if how is not None)
        outs = how.through(equation, values, found, env.shared)
        if outs is None:
            return _as_ready(bind(equation, [env.use(v) for v in equation.invars]))
        return outs

    def _open(self, equation: Any, env: _Environment) -> list[Outcome]:
        """Run an operation that holds jaxprs by running what they hold."""
        name = equation.primitive.name
        if name == "scan":
            return self._scan(equation, env)
        if name == "cond":
            return self._branch(equation, env)
        found = [env.deferred(v) for v in equation.invars]
        values = [env.value(v) for v in equation.invars]
        if name in _REMATS:
            return self._rematerialise(equation, values, found)
        inner = equation.params["jaxpr" if "jaxpr" in equation.params else "call_jaxpr"]
        return self.evaluate(inner, values, found)

    def _rematerialise(
        self, equation: Any, values: Sequence[Any], deferred: list[Deferred | None]
    ) -> list[Outcome]:
        inner, options = equation.params["jaxpr"], equation.params
        closed = inner if isinstance(inner, core.ClosedJaxpr) else core.ClosedJaxpr(inner, ())
        inside = _Evaluator(self._keeping, is_surrounded=False)
        hows: list[Deferred | None] = []

        def evaluate(*values: Any) -> list[Any]:
            outs = inside.evaluate(closed, values, deferred)
            # Of the last trace: each finds the same.
            hows[:] = [how for _, how in outs]
            return [value for value, _ in outs]

        again = self._keeping.again(
            evaluate,
            is_surrounded=self._is_surrounded,
            policy=options["policy"],
            prevent_cse=options["prevent_cse"],
        )
        return list(zip(again(*values), hows, strict=True))

    def _branch(self, equation: Any, env: _Environment) -> list[Outcome]:
        """Run the branch that is chosen; all of them get what is ready."""
        index, *operands = [env.use(v) for v in equation.invars]

        def run(branch: core.ClosedJaxpr, *operands: Any) -> list[Any]:
            return _ready(self.evaluate(branch, operands, [None] * len(operands)))

        branches = [partial(run, branch) for branch in equation.params["branches"]]
        return _as_ready(jax.lax.switch(index, branches, *operands))

    def _scan(self, equation: Any, env: _Environment) -> list[Outcome]:
        """Run a scan whose body makes the rows ready that it is given."""
        options = equation.params
        num_consts, num_carry = scan_sizes(
            options["jaxpr"],
            [v.aval.ndim for v in equation.invars],
            [v.aval.ndim for v in equation.outvars],
        )
        num_whole = num_consts + num_carry
        hows = [env.deferred(v) for v in equation.invars[:num_consts]]
        hows = [how if how is not None and how.enters_loops else None for how in hows]
        consts = [
            env.use(v) if how is None else env.value(v)
            for v, how in zip(equation.invars, hows, strict=False)
        ]
        carry = [env.use(v) for v in equation.invars[num_consts:num_whole]]
        stacks = equation.invars[num_whole:]
        rows = [how.row() if (how := env.deferred(v)) else None for v in stacks]
        stacked = [
            env.use(v) if row is None else env.value(v) for v, row in zip(stacks, rows, strict=True)
        ]
        deferred = [*hows, *[None] * num_carry, *rows]
        keeping = self._keeping
        # Only parts that are made ready inside need what keeps them from being kept.
        surrounds = keeping.decides and any(deferred)
        inside = _Evaluator(keeping, is_surrounded=surrounds or self._is_surrounded)

        def body(carry: list[Any], parts: list[Any]) -> tuple[list[Any], list[Any]]:
            outs = _ready(inside.evaluate(options["jaxpr"], [*consts, *carry, *parts], deferred))
            return outs[:num_carry], outs[num_carry:]

        carry, made = jax.lax.scan(
            keeping.surround(body, in_loop=True) if surrounds else body,
            carry,
            stacked,
            length=options["length"],
            reverse=options["reverse"],
            unroll=options["unroll"],
        )
        results = [*carry, *made]
        return _as_ready(keeping.results(results) if self._is_surrounded else results)


def _holds(equation: Any) -> bool:
    """Say whether an operation is rematerialised, or one inside of it."""
    if equation.primitive.name in _REMATS:
        return True
    return any(inner.primitive.name in _REMATS for inner in equations_inside(equation))


class _Environment:
    """The values of a jaxpr's variables."""

    def __init__(
        self,
        jaxpr: core.ClosedJaxpr,
        values: Sequence[Any],
        deferred: Sequence[Deferred | None],
    ) -> None:
        inner = jaxpr.jaxpr
        self._values: dict[Any, Any] = dict(zip(inner.constvars, jaxpr.consts, strict=True))
        self._values |= dict(zip(inner.invars, values, strict=True))
        hows = zip(inner.invars, deferred, strict=True)
        self._deferred = {v: how for v, how in hows if how is not None}
        self._ready: dict[Any, Any] = {}
        self.shared = SharedInputs(inner)

    def value(self, variable: Any) -> Any:
        """As it is."""
        return variable.val if isinstance(variable, core.Literal) else self._values[variable]

    def deferred(self, variable: Any) -> Deferred | None:
        """The conversion that makes it ready; None if it is ready."""
        return None if isinstance(variable, core.Literal) else self._deferred.get(variable)

    def use(self, variable: Any) -> Any:
        """Ready; made so once."""
        how = self.deferred(variable)
        if how is None:
            return self.value(variable)
        if variable not in self._ready:
            self._ready[variable] = how.use(self.value(variable))
        return self._ready[variable]

    def outcome(self, variable: Any) -> Outcome:
        """As it is, and how it becomes ready."""
        return self.value(variable), self.deferred(variable)

    def write(self, variables: Sequence[Any], outcomes: Sequence[Outcome]) -> None:
        """Keep results."""
        for variable, (value, how) in zip(variables, outcomes, strict=True):
            self._values[variable] = value
            if how is not None:
                self._deferred[variable] = how


def bind(equation: Any, values: Sequence[Any]) -> list[Any]:
    """Run one equation of a jaxpr on other values than it was traced with."""
    params = equation.primitive.get_bind_params(equation.params)
    with equation.ctx.manager:
        found = equation.primitive.bind(*values, **params)
    return list(found) if equation.primitive.multiple_results else [found]


def _as_ready(values: Sequence[Any]) -> list[Outcome]:
    return [(value, None) for value in values]


def _ready(outcomes: Sequence[Outcome]) -> list[Any]:
    return [value if how is None else how.use(value) for value, how in outcomes]
