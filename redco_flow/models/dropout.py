"""Dropout whose mask belongs to an example, not to a place in the batch.

Each example carries its own key, so that the same example meets the same masks in any micro-batch,
on any device and after a resume.
Dims in this file: B batch.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from redco_flow.models.random_bits import fold_in, random_bits, random_bits_at


def example_keys(rngs: jax.Array | None, num_examples: int) -> jax.Array | None:
    """Check that `rngs` is one threefry key per example and return the raw keys (B, 2).

    Raises:
        ValueError: another number of keys, or keys of another generator.
    """
    if rngs is None:
        return None
    if jnp.issubdtype(rngs.dtype, jax.dtypes.prng_key):
        rngs = jax.random.key_data(rngs)
    if rngs.shape != (num_examples, 2):
        raise ValueError(
            f"rngs has raw shape {rngs.shape}; give one threefry key per example, "
            f"({num_examples}, 2): jax.random.split(jax.random.key(seed), {num_examples})."
        )
    return rngs


def fold_keys(keys: jax.Array | None, data: int | jax.Array) -> jax.Array | None:
    """Derive a new key per example (a layer's, say) from raw keys (B, 2); None stays None."""
    return None if keys is None else fold_in(keys, data)


def dropout(x: jax.Array, rate: float, keys: jax.Array | None, site: int) -> jax.Array:
    """Zero elements of `x` (B, …) with probability `rate` and scale up the others.

    Args:
        x: activations; the mask of row b depends on `keys[b]`, `site` and the row's shape only.
        rate: in [0, 1).
        keys: raw keys (B, 2), or None for no dropout.
        site: which of the places that share `keys` this is.
    """
    if keys is None or rate == 0:
        return x
    is_kept = _is_kept(random_bits(keys, x.shape[1:], stream=site), rate)
    return jnp.where(is_kept, x * jnp.asarray(1 / (1 - rate), x.dtype), jnp.zeros((), x.dtype))


def keep_factors(places: jax.Array, rate: float, keys: jax.Array, site: int) -> jax.Array:
    """Return what `dropout` multiplies some elements of larger rows by: (B, *places' shape).

    Args:
        places: uint32, of the elements in their row, counted as its dims lie.
    """
    is_kept = _is_kept(random_bits_at(keys, places, site), rate)
    return jnp.where(is_kept, np.float32(1 / (1 - rate)), np.float32(0))


def _is_kept(bits: jax.Array, rate: float) -> jax.Array:
    is_kept: jax.Array = jax.lax.optimization_barrier(bits < np.uint32((1 - rate) * 2**32))
    return is_kept
