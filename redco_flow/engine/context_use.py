"""Whether a function makes anything of the mesh axis `context`.

A model that was not written for it computes the right numbers there, each of them once per
context shard: that must not go unnoticed. Knows jaxprs; refuses to know models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr

from redco_flow.engine.dataflow.trace import function_jaxpr
from redco_flow.engine.errors import ShardingError
from redco_flow.engine.mesh import CONTEXT_AXIS


def check_context_is_used(
    function: Callable[..., Any], params: Any, inputs: Sequence[Any], num_context_shards: int
) -> None:
    """Trace `function(params, *inputs)`, which sees the mesh, where there are several shards.

    Raises:
        ShardingError: it splits no sequence; the message says what does.
    """
    if num_context_shards == 1:
        return
    if not any(map(_names_context, _equations(function_jaxpr(function, params, inputs).jaxpr))):
        raise ShardingError(
            f"num_context_shards={num_context_shards}, and the function splits no sequence: every "
            "context shard would compute the same. Take a model of redco_flow.models; or attend "
            "with models.sequence_attention.attend_sequence in your own, and lay its activations "
            "out with models.context_axis.split_sequence; or leave num_context_shards at 1."
        )


def _equations(jaxpr: Jaxpr) -> Iterator[Any]:
    """Yield every equation, those inside others too."""
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for inner in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(inner, ClosedJaxpr):
                    yield from _equations(inner.jaxpr)
                elif isinstance(inner, Jaxpr):
                    yield from _equations(inner)


def _names_context(equation: Any) -> bool:
    """Say whether an equation lays arrays out over the axis, or runs on each of its shards."""
    if equation.primitive.name == "shard_map":
        specs = equation.params["in_specs"]
    elif equation.primitive.name == "sharding_constraint":
        specs = (equation.params["sharding"].spec,)
    else:
        return False
    entries = (entry for spec in specs for entry in spec)
    return any(CONTEXT_AXIS in (e if isinstance(e, tuple) else (e,)) for e in entries)
