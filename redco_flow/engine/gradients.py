"""Gradients of a mean over a whole global batch, accumulated over micro-batches.

Gradients of totals are summed and divided once by the sum of weights: never a mean of means.
Dims in this file: M micro-batches, B rows of one micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from redco_flow.engine.local_gradients import local_zeros, on_local_rows


class Sums(NamedTuple):
    """Sums over examples, float32 scalars: of totals, of weights, and of measures by name."""

    total: jax.Array
    weight: jax.Array
    measures: Mapping[str, jax.Array] = {}


# (params, micro-batch) -> sums over its rows
SumFn = Callable[[Any, Any], Sums]


def mean_gradients(sum_fn: SumFn, params: Any, micro_batches: Any) -> tuple[Any, Sums]:
    """Return the gradients of sum(totals) / sum(weights), and all sums.

    Args:
        sum_fn: the sum of totals is differentiated.
        micro_batches: a tree of arrays (M, B, ...).

    Returns:
        Gradients, float32 or wider, sharded like the parameters; zero where all weights are.
    """
    gradients, sums = _accumulate(sum_fn, params, micro_batches)
    divisor = safe_divisor(sums.weight)
    return jax.tree.map(lambda g: g / divisor.astype(g.dtype), gradients), sums


def safe_divisor(weight: jax.Array) -> jax.Array:
    """Return the weight, or 1 where there is none, so that nothing over nothing is zero."""
    return jnp.where(weight > 0, weight, jnp.ones_like(weight))


def global_norm(gradients: Any) -> jax.Array:
    """Return the 2-norm of all gradients together, float32.

    A sum of squares per array keeps every gradient where it is; raveling them first would gather
    the sharded ones.
    """
    squares = [jnp.sum(jnp.square(g.astype(jnp.float32))) for g in jax.tree.leaves(gradients)]
    return jnp.sqrt(sum(squares, jnp.zeros((), jnp.float32)))


def clip(gradients: Any, norm: jax.Array, max_norm: float) -> Any:
    """Scale gradients of 2-norm `norm` down to `max_norm` where they are longer."""
    scale = max_norm / jnp.maximum(norm, max_norm)
    return jax.tree.map(lambda g: g * scale.astype(g.dtype), gradients)


def _accumulate(sum_fn: SumFn, params: Any, micro_batches: Any) -> tuple[Any, Sums]:
    def total_and_sums(params: Any, micro_batch: Any) -> tuple[jax.Array, Sums]:
        sums = sum_fn(params, micro_batch)
        return sums.total, sums

    differentiate = jax.grad(total_and_sums, has_aux=True)
    (num_micro,) = {x.shape[0] for x in jax.tree.leaves(micro_batches)}
    if num_micro == 1:
        only = jax.tree.map(lambda x: x[0], micro_batches)
        gradients, sums = differentiate(params, only)
        return _widen(gradients), sums
    empty = (_widen(jax.tree.map(jnp.zeros_like, params)), jnp.zeros((), jnp.float32))
    local = on_local_rows(differentiate, params, micro_batches)
    if local is None:
        return _add_up(differentiate, params, micro_batches, empty)
    of_shards = _add_up(local.of_rows, params, local.micro_batches, local_zeros(empty))
    gradients, sums = jax.tree.map(lambda x: jnp.sum(x, axis=0), of_shards)
    return gradients, sums


def _add_up(
    differentiate: Callable[[Any, Any], tuple[Any, Sums]],
    params: Any,
    micro_batches: Any,
    empty: tuple[Any, jax.Array],
) -> tuple[Any, Sums]:
    """Return gradients and sums over the micro-batches; `empty` are zeros like both."""

    def add_one(carry: Any, micro_batch: Any) -> tuple[Any, Mapping[str, jax.Array]]:
        gradients, (total, weight, measures) = differentiate(params, micro_batch)
        return jax.tree.map(jnp.add, carry, (_widen(gradients), total, weight)), measures

    gradients, zero = empty
    start = (gradients, zero, zero)
    (gradients, total, weight), measures = jax.lax.scan(add_one, start, micro_batches)
    return gradients, Sums(total, weight, jax.tree.map(lambda x: jnp.sum(x, axis=0), measures))


def _widen(gradients: Any) -> Any:
    return jax.tree.map(lambda g: g.astype(jnp.promote_types(g.dtype, jnp.float32)), gradients)
