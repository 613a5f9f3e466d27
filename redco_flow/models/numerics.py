"""The parts every transformer here is made of: norms, softmax, wide products.

Pure functions of arrays. Scores, softmax and norms are float32 whatever the inputs are; results
come back in the inputs' dtype.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

# Far below any score, far above float32's lowest: sums of a few of these stay finite.
MASKED = -1e9


def scaled(x: jax.Array, factor: float) -> jax.Array:
    """Multiply by a constant and round the result alone.

    A constant in the dtype of `x` is off for all elements alike: 1/12 by 0.2% in bfloat16.
    """
    return (x * np.float32(factor)).astype(x.dtype)


@partial(jax.checkpoint, static_argnums=2, prevent_cse=False)
def rms_norm(x: jax.Array, scale: jax.Array, epsilon: float) -> jax.Array:
    """Divide by the root mean square over the last dims, those of `scale`, and scale; float32.

    The backward pass computes it again from `x`: kept intermediates would be four times `x`.
    """
    wide = x.astype(jnp.float32)
    dims = tuple(range(-scale.ndim, 0))
    variance = jnp.mean(jnp.square(wide), axis=dims, keepdims=True)
    return (wide * jax.lax.rsqrt(variance + epsilon) * scale).astype(x.dtype)


@partial(jax.checkpoint, static_argnums=3, prevent_cse=False)
def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array, epsilon: float) -> jax.Array:
    """Bring the last dim to mean 0 and variance 1, scale and shift; float32 inside.

    Computed again in the backward pass, like `rms_norm`.
    """
    wide = x.astype(jnp.float32)
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
    return (centred * jax.lax.rsqrt(variance + epsilon) * scale + bias).astype(x.dtype)


@jax.custom_vjp
def softmax(scores: jax.Array) -> jax.Array:
    """Normalise exponentials over the last dim; its gradient needs nothing but the result."""
    shifted = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
    return shifted / jnp.sum(shifted, axis=-1, keepdims=True)


def _softmax_forward(scores: jax.Array) -> tuple[jax.Array, jax.Array]:
    weights = softmax(scores)
    return weights, weights


def _softmax_backward(weights: jax.Array, cotangent: jax.Array) -> tuple[jax.Array]:
    mean = jnp.sum(weights * cotangent, axis=-1, keepdims=True)
    return (weights * (cotangent - mean),)


softmax.defvjp(_softmax_forward, _softmax_backward)


def softmax_with_sinks(scores: jax.Array, sinks: jax.Array) -> jax.Array:
    """Normalise exponentials over the last dim and a sink's, whose own weight is dropped.

    Args:
        sinks: broadcast to (…, 1).
    """
    shaped = jnp.broadcast_to(sinks.astype(jnp.float32), (*scores.shape[:-1], 1))
    weights: jax.Array = _softmax_with_sink(scores, shaped)
    return weights


@jax.custom_vjp
def _softmax_with_sink(scores: jax.Array, sink: jax.Array) -> jax.Array:
    return _weights_and_sink(scores, sink)[0]


def _weights_and_sink(scores: jax.Array, sink: jax.Array) -> tuple[jax.Array, jax.Array]:
    largest = jnp.maximum(jnp.max(scores, axis=-1, keepdims=True), sink)
    shifted, sunk = jnp.exp(scores - largest), jnp.exp(sink - largest)
    total = jnp.sum(shifted, axis=-1, keepdims=True) + sunk
    return shifted / total, sunk / total


def _sink_forward(
    scores: jax.Array, sink: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    weights, sunk = _weights_and_sink(scores, sink)
    return weights, (weights, sunk)


def _sink_backward(
    kept: tuple[jax.Array, jax.Array], cotangent: jax.Array
) -> tuple[jax.Array, jax.Array]:
    weights, sunk = kept
    mean = jnp.sum(weights * cotangent, axis=-1, keepdims=True)
    return weights * (cotangent - mean), -sunk * mean


_softmax_with_sink.defvjp(_sink_forward, _sink_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def wide_einsum(equation: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """Return `einsum(equation, x, y)` in float32, with gradients computed in the inputs' dtype.

    Without the second half a bfloat16 model would multiply float32 cotangents by bfloat16
    weights, which accelerators do at float32 speed.
    """
    return jnp.einsum(equation, x, y, preferred_element_type=jnp.float32)


def _wide_einsum_forward(
    equation: str, x: jax.Array, y: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return wide_einsum(equation, x, y), (x, y)


def _wide_einsum_backward(
    equation: str, inputs: tuple[jax.Array, jax.Array], cotangent: jax.Array
) -> tuple[jax.Array, jax.Array]:
    _, pull_back = jax.vjp(partial(jnp.einsum, equation), *inputs)
    gradients: tuple[jax.Array, jax.Array] = pull_back(cotangent.astype(inputs[0].dtype))
    return gradients


wide_einsum.defvjp(_wide_einsum_forward, _wide_einsum_backward)


def attention_mask_bias(mask: jax.Array) -> jax.Array:
    """Turn a mask (nonzero: may be attended to) into what is added to the scores, float32."""
    return jnp.where(mask != 0, 0.0, MASKED).astype(jnp.float32)
