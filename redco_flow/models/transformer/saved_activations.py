"""The activations that a layer keeps for its backward pass, by name; model shards keep parts.

The residual stream is replicated over the mesh axis `model`, so a shard can keep its part of the
sequence without sending anything; the backward pass gathers the parts again (Megatron-LM's
`distribute_saved_activations`). The forward pass computes with what it has in full.
Dims in this file: B batch, T sequence, D model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive, Var
from jax.interpreters import ad, batching, mlir, partial_eval
from jax.sharding import PartitionSpec

from redco_flow.models.attention.context import CONTEXT_AXIS, num_context_shards, split_sequence
from redco_flow.models.config import StackConfig
from redco_flow.models.projections import MODEL_AXIS, num_model_shards

# What of a result that is offloaded in part stays on the device is named so after its name.
_REST = ", the rest"


def layer_choices(config: StackConfig) -> dict[str, str]:
    """Return what becomes of a layer's results by their names, on the mesh traced for."""
    return config.choices_on(num_model_shards())


def saved(
    x: jax.Array, name: str, choices: Mapping[str, str], offload_share: float = 1.0
) -> jax.Array:
    """Name a layer's result (B, T, …), and keep a part of it where that is its choice.

    Args:
        offload_share: see `named_in_parts`.
    """
    if choices.get(name) != "split":
        return named_in_parts(x, name, offload_share)
    x = _with_sequence_over(x)  # Or the compiler would split what it was computed from, too.
    part = checkpoint_name(_with_sequence_over(x, MODEL_AXIS), name)
    now_or_again: jax.Array = _now_or_again.bind(x, _with_sequence_over(part))
    return now_or_again


def named_in_parts(x: jax.Array, name: str, offload_share: float) -> jax.Array:
    """Name a result (B, T, …), of which `save_policy` offloads a share of each device's tokens.

    All of it has the name where the share is 1, or where the context shards do not divide T.
    """
    num_shards = num_context_shards()
    num_tokens, is_uneven = divmod(x.shape[1], num_shards)
    num_offloaded = round(offload_share * num_tokens)
    if is_uneven or num_offloaded == num_tokens:
        named: jax.Array = checkpoint_name(x, name)
        return named
    by_shard = split_sequence(x.reshape(x.shape[0], num_shards, num_tokens, *x.shape[2:]))
    offloaded = checkpoint_name(by_shard[:, :, :num_offloaded], name)
    kept = checkpoint_name(by_shard[:, :, num_offloaded:], name + _REST)
    again = jnp.concatenate([offloaded, kept], axis=2).reshape(x.shape)
    now_or_again: jax.Array = _now_or_again.bind(x, split_sequence(again))
    return now_or_again


def save_policy(choices: Mapping[str, str]) -> Any:
    """Return the policy of `jax.checkpoint` that keeps and offloads results by their names."""
    kept = [name for name, choice in choices.items() if choice in ("keep", "split")]
    offloaded = [name for name, choice in choices.items() if choice == "offload"]
    if choices.get("layer_input") == "keep":
        kept.remove("layer_input")  # It is kept as the layer's argument: not twice.
    if not offloaded:
        return jax.checkpoint_policies.save_only_these_names(*kept)
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[*kept, *(name + _REST for name in offloaded)],
        names_which_can_be_offloaded=offloaded,
        offload_src="device",
        offload_dst="pinned_host",
    )


def _with_sequence_over(x: jax.Array, *axes: str) -> jax.Array:
    """Split T over the context shards and these axes; B and D stay as they are."""
    context = (CONTEXT_AXIS,) if num_context_shards() > 1 else ()
    free = PartitionSpec.UNCONSTRAINED
    spec = PartitionSpec(free, (*context, *axes), *[free] * (x.ndim - 2))
    placed: jax.Array = jax.lax.with_sharding_constraint(x, spec)
    return placed


# (now, again) -> now; where `jax.checkpoint` computes it for the backward pass, again. Both are
# the same numbers. JAX's own way to have a value kept in another form moves it to another memory.
_now_or_again = Primitive("now_or_again")
_now_or_again.def_impl(lambda now, *_again: now)
_now_or_again.def_abstract_eval(lambda now, *_again: now)
mlir.register_lowering(_now_or_again, lambda _context, now, *_again: [now])


def _jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    return _now_or_again.bind(*primals), tangents[0]


def _batch(values: Sequence[Any], dims: Sequence[Any]) -> tuple[Any, Any]:
    size = next(x.shape[dim] for x, dim in zip(values, dims, strict=True) if dim is not None)
    first = [batching.bdim_at_front(x, dim, size) for x, dim in zip(values, dims, strict=True)]
    return _now_or_again.bind(*first), 0


def _partial_eval(
    _policy: Any, is_unknown: Sequence[bool], is_there: Sequence[bool], equation: Any
) -> tuple[Any, Any, list[bool], list[bool], list[Any]]:
    """Take `now` where it is computed first, and `again` where it is computed again."""
    now, *again = equation.invars
    needed = equation.invars if any(is_unknown) else again or [now]
    missing = [
        variable
        for variable, there in zip(equation.invars, is_there, strict=True)
        if variable in needed and isinstance(variable, Var) and not there
    ]
    staged = equation.replace(invars=list(needed))
    if any(is_unknown):
        return None, staged, [True], [True], missing
    return equation.replace(invars=[now]), staged, [False], [True], missing


ad.primitive_jvps[_now_or_again] = _jvp
batching.primitive_batchers[_now_or_again] = _batch
partial_eval.partial_eval_jaxpr_custom_rules[_now_or_again] = _partial_eval
