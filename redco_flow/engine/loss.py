"""Losses that add up: every example brings a total and a weight.

The engine divides the sum of totals by the sum of weights over a whole global batch, so a mean
over tokens stays one under accumulation, over shards and in partial batches.
Dims in this file: B batch, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

IGNORED_LABEL = -100

Batch = dict[str, jax.Array]
PerExample = tuple[jax.Array, jax.Array]
# (params, batch, rngs [B], is_training) -> scalar, or (totals [B], weights [B])
LossFn = Callable[[Any, Batch, jax.Array, bool], jax.Array | PerExample]


def cross_entropy(
    logits: jax.Array,
    labels: jax.Array,
    *,
    ignored_label: int = IGNORED_LABEL,
    label_smoothing: float = 0.0,
) -> PerExample:
    """Return each example's summed cross-entropy and its number of labels, float32.

    Args:
        logits: (B, ..., V) of any float dtype; may be sharded along V, which costs an exchange
            of one number per label, never of the logits.
        labels: (B, ...) class ids; `ignored_label` and every other negative id counts nothing.
        label_smoothing: share of the probability that is spread evenly over all classes.
    """
    logits, labels = logits.astype(jnp.float32), jnp.asarray(labels)
    counted = ((labels != ignored_label) & (labels >= 0)).astype(jnp.float32)
    # A comparison instead of a lookup: it stays local where the vocabulary is sharded, and an
    # ignored label selects nothing instead of reading out of bounds.
    is_label = jax.lax.broadcasted_iota(labels.dtype, logits.shape, logits.ndim - 1)
    is_label = is_label == labels[..., None]
    picked = jnp.sum(jnp.where(is_label, logits, 0.0), axis=-1)
    if label_smoothing:
        picked = (1 - label_smoothing) * picked + label_smoothing * jnp.mean(logits, axis=-1)
    losses = (jax.nn.logsumexp(logits, axis=-1) - picked) * counted
    trailing = tuple(range(1, labels.ndim))
    return jnp.sum(losses, axis=trailing), jnp.sum(counted, axis=trailing)


def per_example_loss(
    loss_fn: LossFn, params: Any, batch: Batch, rngs: jax.Array, *, is_training: bool
) -> PerExample:
    """Call a loss function and return float32 totals [B] and weights [B].

    One that returns a scalar is called on single examples instead, each with weight 1.

    Raises:
        ValueError: it returns neither a scalar nor two arrays of shape (B,).
    """
    num_examples = rngs.shape[0]
    result = loss_fn(params, batch, rngs, is_training)
    if not isinstance(result, tuple):
        _check_shape("a scalar loss", result, ())
        result = _one_by_one(loss_fn, params, batch, rngs, is_training=is_training)
    if len(result) != 2:
        raise ValueError(f"loss_fn returned {len(result)} values; return a scalar, or two.")
    totals, weights = result
    _check_shape("totals", totals, (num_examples,))
    _check_shape("weights", weights, (num_examples,))
    return totals.astype(jnp.float32), jax.lax.stop_gradient(weights.astype(jnp.float32))


def _one_by_one(
    loss_fn: LossFn, params: Any, batch: Batch, rngs: jax.Array, *, is_training: bool
) -> PerExample:
    def one(example: Batch, key: jax.Array) -> Any:
        single = jax.tree.map(lambda x: x[None], example)
        return loss_fn(params, single, key[None], is_training)

    totals = jax.vmap(one)(batch, rngs)
    return totals, jnp.ones_like(totals)


def _check_shape(name: str, value: Any, expected: tuple[int, ...]) -> None:
    if jnp.shape(value) != expected:
        raise ValueError(
            f"loss_fn returned {name} of shape {jnp.shape(value)}, expected {expected}; return a "
            "scalar, or (totals, weights) with one number per example each."
        )
