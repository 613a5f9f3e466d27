"""Losses that add up: every example brings a total and a weight.

The engine divides the sum of totals by the sum of weights over a whole global batch, so a mean
over tokens stays one under accumulation, over shards and in partial batches. Whatever else is
measured of an example comes as further totals, whose means by the same weights are logged.
Dims in this file: B batch, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from redco_flow.engine.callbacks import LOGGED

IGNORED_LABEL = -100

Batch = dict[str, jax.Array]
PerExample = tuple[jax.Array, jax.Array]
# Further totals [B] by name.
Measures = Mapping[str, jax.Array]
Measured = tuple[jax.Array, jax.Array, Measures]
# (params, batch, rngs [B], is_training) -> scalar, or (totals [B], weights [B]), or those and
# measures
LossFn = Callable[[Any, Batch, jax.Array, bool], jax.Array | PerExample | Measured]


def cross_entropy(
    logits: jax.Array,
    labels: jax.Array,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> PerExample:
    """Return each example's summed cross-entropy and its number of labels, float32.

    Args:
        logits: (B, ..., V) of any float dtype; may be sharded along V, which costs an exchange
            of one number per label, never of the logits.
        labels: (B, ...) class ids; IGNORED_LABEL and every other negative id counts nothing.
        label_smoothing: share of the probability that is spread evenly over all classes.
        z_loss: coefficient of log(Z)^2, added to each label's loss, where Z is the sum of the
            exponentiated logits (PaLM, arXiv 2204.02311, section 5): it keeps log(Z) near 0.
    """
    labels = jnp.asarray(labels)
    counted = ((labels != IGNORED_LABEL) & (labels >= 0)).astype(jnp.float32)
    losses = label_losses(label_smoothing, z_loss, logits, labels) * counted
    trailing = tuple(range(1, labels.ndim))
    return jnp.sum(losses, axis=trailing), jnp.sum(counted, axis=trailing)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def label_losses(
    label_smoothing: float, z_loss: float, logits: jax.Array, labels: jax.Array
) -> jax.Array:
    """Return each label's cross-entropy (B, ...), float32.

    Its gradient is one pass over the logits; differentiated term by term it would be written
    three times, and logits are the largest array of a training step.
    """
    return _label_losses_forward(label_smoothing, z_loss, logits, labels)[0]


def _label_losses_forward(
    label_smoothing: float, z_loss: float, logits: jax.Array, labels: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
    wide = logits.astype(jnp.float32)
    picked = jnp.sum(jnp.where(_is_label(logits, labels), wide, 0.0), axis=-1)
    if label_smoothing:
        picked = (1 - label_smoothing) * picked + label_smoothing * jnp.mean(wide, axis=-1)
    normalizer = jax.nn.logsumexp(wide, axis=-1)
    losses = normalizer - picked
    if z_loss:
        losses = losses + z_loss * jnp.square(normalizer)
    return losses, (logits, labels, normalizer)


def _label_losses_backward(
    label_smoothing: float,
    z_loss: float,
    kept: tuple[jax.Array, jax.Array, jax.Array],
    cotangent: jax.Array,
) -> tuple[jax.Array, None]:
    logits, labels, normalizer = kept
    probabilities = jnp.exp(logits.astype(jnp.float32) - normalizer[..., None])
    elsewhere = label_smoothing / logits.shape[-1]
    wanted = jnp.where(_is_label(logits, labels), 1 - label_smoothing + elsewhere, elsewhere)
    if z_loss:
        probabilities = probabilities * (1 + 2 * z_loss * normalizer)[..., None]
    gradient = (probabilities - wanted) * cotangent[..., None]
    return gradient.astype(logits.dtype), None


label_losses.defvjp(_label_losses_forward, _label_losses_backward)


def _is_label(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Say which class is each label's: (B, ..., V).

    A comparison instead of a lookup: it stays local where the vocabulary is sharded, and an
    ignored label selects nothing instead of reading out of bounds.
    """
    classes = jax.lax.broadcasted_iota(labels.dtype, logits.shape, logits.ndim - 1)
    return classes == labels[..., None]


def per_example_loss(
    loss_fn: LossFn, params: Any, batch: Batch, rngs: jax.Array, *, is_training: bool
) -> Measured:
    """Call a loss function and return float32 totals [B], weights [B] and measures [B].

    One that returns a scalar is called on single examples instead, each with weight 1.

    Raises:
        ValueError: it returns neither a scalar nor arrays of shape (B,), or a measure has the
            name of something that is logged in any case.
    """
    num_examples = rngs.shape[0]
    result = loss_fn(params, batch, rngs, is_training)
    if not isinstance(result, tuple):
        _check_shape("a scalar loss", result, ())
        result = _one_by_one(loss_fn, params, batch, rngs, is_training=is_training)
    if len(result) not in (2, 3):
        raise ValueError(f"loss_fn returned {len(result)} values; return a scalar, two, or three.")
    totals, weights = result[:2]
    measures = _checked_names(result[2]) if len(result) == 3 else {}
    for name, value in {**measures, "totals": totals, "weights": weights}.items():
        _check_shape(name, value, (num_examples,))
    kept = jax.lax.stop_gradient({"weights": weights, "measures": measures})
    kept = jax.tree.map(lambda x: x.astype(jnp.float32), kept)
    return totals.astype(jnp.float32), kept["weights"], kept["measures"]


def _one_by_one(
    loss_fn: LossFn, params: Any, batch: Batch, rngs: jax.Array, *, is_training: bool
) -> PerExample:
    def one(example: Batch, key: jax.Array) -> Any:
        single = jax.tree.map(lambda x: x[None], example)
        return loss_fn(params, single, key[None], is_training)

    totals = jax.vmap(one)(batch, rngs)
    return totals, jnp.ones_like(totals)


def _checked_names(measures: Any) -> dict[str, jax.Array]:
    if not isinstance(measures, Mapping):
        raise ValueError(
            f"loss_fn returned a third value of type {type(measures).__name__}; return measures as "
            "{name: one number per example}."
        )
    for name in measures:
        if name in LOGGED:
            raise ValueError(
                f"loss_fn returned a measure {name!r}, which is logged in any case; choose a name "
                f"other than {', '.join(LOGGED)}."
            )
    return dict(measures)


def _check_shape(name: str, value: Any, expected: tuple[int, ...]) -> None:
    if jnp.shape(value) != expected:
        raise ValueError(
            f"loss_fn returned {name} of shape {jnp.shape(value)}, expected {expected}; return a "
            "scalar, or (totals, weights) or (totals, weights, measures) with one number per "
            "example each."
        )
