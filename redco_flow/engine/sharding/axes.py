"""Find uses of mesh axes in a traced function (jaxpr)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.sharding import NamedSharding, PartitionSpec

from redco_flow.engine.errors import ShardingError
from redco_flow.engine.sharding.dataflow.trace import function_jaxpr
from redco_flow.engine.sharding.mesh import CONTEXT_AXIS


def equations(jaxpr: Jaxpr) -> Iterator[Any]:
    """Yield every equation, those inside others too."""
    for equation in jaxpr.eqns:
        yield equation
        yield from equations_inside(equation)


def equations_inside(equation: Any) -> Iterator[Any]:
    """Yield the equations of the jaxprs that one holds."""
    for value in _parameters(equation):
        if isinstance(value, ClosedJaxpr):
            yield from equations(value.jaxpr)
        elif isinstance(value, Jaxpr):
            yield from equations(value)


def names_axis(equation: Any, axis: str) -> bool:
    """Say whether an equation lays arrays out over the axis, or runs on each of its shards."""
    specs = (_spec(value) for value in _parameters(equation))
    entries = (entry for spec in specs if spec is not None for entry in spec)
    return any(axis in (e if isinstance(e, tuple) else (e,)) for e in entries)


def takes_axis(equation: Any, axis: str) -> bool:
    """Say whether a shard_map runs on each of the axis' shards, whatever its specs name."""
    # Which parameter holds the axes is not the same in all versions of JAX.
    held = (value for value in equation.params.values() if isinstance(value, frozenset))
    return any(axis in axes for axes in held)


def _parameters(equation: Any) -> Iterator[Any]:
    for value in equation.params.values():
        yield from value if isinstance(value, (list, tuple)) else (value,)


def _spec(value: Any) -> PartitionSpec | None:
    if isinstance(value, NamedSharding):
        return value.spec
    return value if isinstance(value, PartitionSpec) else None


def check_context_is_used(
    function: Callable[..., Any], params: Any, inputs: Sequence[Any], num_context_shards: int
) -> None:
    """Trace `function(params, *inputs)`, which sees the mesh, where there are several shards.

    Raises:
        ShardingError: it splits no sequence; the message says what does.
    """
    if num_context_shards == 1:
        return
    traced = equations(function_jaxpr(function, params, inputs).jaxpr)
    if not any(names_axis(equation, CONTEXT_AXIS) for equation in traced):
        raise ShardingError(
            f"num_context_shards={num_context_shards}, and the function splits no sequence: every "
            "context shard would compute the same. Take a model of redco_flow.models; or attend "
            "with models.sequence_attention.attend_sequence in your own, and lay its activations "
            "out with models.context_axis.split_sequence; or leave num_context_shards at 1."
        )
