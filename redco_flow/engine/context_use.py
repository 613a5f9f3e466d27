"""Whether a function makes anything of the mesh axis `context`.

A model that was not written for it computes the right numbers there, each of them once per context
shard: that must not go unnoticed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from redco_flow.engine.axis_use import equations, names_axis
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
    traced = equations(function_jaxpr(function, params, inputs).jaxpr)
    if not any(names_axis(equation, CONTEXT_AXIS) for equation in traced):
        raise ShardingError(
            f"num_context_shards={num_context_shards}, and the function splits no sequence: every "
            "context shard would compute the same. Take a model of redco_flow.models; or attend "
            "with models.sequence_attention.attend_sequence in your own, and lay its activations "
            "out with models.context_axis.split_sequence; or leave num_context_shards at 1."
        )
