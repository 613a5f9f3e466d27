"""Dropout and random bits with one threefry key per example, so that draws depend on no mesh.

A row's draws depend on its own key and its shape alone. Keys are raw, (B, 2) uint32.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import threefry_2x32


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


def fold_in(keys: jax.Array, data: int | jax.Array) -> jax.Array:
    """Derive a new key per example from raw keys (B, 2), by `jax.random.fold_in`."""
    folded = jax.vmap(jax.random.fold_in, in_axes=(0, None))(_typed(keys), data)
    return jax.random.key_data(folded)


def fold_keys(keys: jax.Array | None, data: int | jax.Array) -> jax.Array | None:
    """Do what `fold_in` does (for a layer's number, say); None stays None."""
    return None if keys is None else fold_in(keys, data)


def random_bits(keys: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Draw uint32 (B, *shape) from raw keys (B, 2), by `jax.random.bits`."""
    return jax.vmap(lambda key: jax.random.bits(key, shape))(_typed(keys))


def random_bits_at(keys: jax.Array, places: jax.Array) -> jax.Array:
    """Draw only some elements of what `random_bits` draws: uint32 (B, *places' shape).

    Args:
        places: uint32, of the elements in a row of `random_bits`, counted in row-major order.
    """
    # JAX's counters with `jax_threefry_partitionable`: 64 bits of each element's place.
    counters = jnp.stack([jnp.zeros_like(places), places])

    def draw(key: jax.Array) -> jax.Array:
        first, second = threefry_2x32((key[0], key[1]), counters)
        bits: jax.Array = first ^ second
        return bits

    return jax.vmap(draw)(keys)


def check_num_elements(shape: tuple[int, ...]) -> None:
    """Raise ValueError if a row has more elements than a uint32 place can name."""
    if math.prod(shape) >= 1 << 32:
        raise ValueError(f"random_bits_at: {shape} has 2^32 elements or more for one key.")


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
    is_kept = keep_mask(fold_in(keys, site), x.shape[1:], rate)
    # Rounded to 8 bits itself, the factor would make all that is kept too large or too small.
    kept = (x * np.float32(1 / (1 - rate))).astype(x.dtype)
    return jnp.where(is_kept, kept, jnp.zeros((), x.dtype))


def keep_mask(keys: jax.Array, shape: tuple[int, ...], rate: float) -> jax.Array:
    """Draw which elements of (B, *shape) a dropout keeps: bools, from raw keys (B, 2)."""
    return _is_kept(random_bits(keys, shape), rate)


def keep_factors(places: jax.Array, rate: float, keys: jax.Array, site: int) -> jax.Array:
    """Return what `dropout` multiplies some elements of larger rows by: (B, *places' shape).

    Args:
        places: see `random_bits_at`.
    """
    is_kept = _is_kept(random_bits_at(fold_in(keys, site), places), rate)
    return jnp.where(is_kept, np.float32(1 / (1 - rate)), np.float32(0))


def _is_kept(bits: jax.Array, rate: float) -> jax.Array:
    # The largest that is kept: of rates next to 0 all are, and the limit itself is no uint32.
    is_kept: jax.Array = bits <= np.uint32(max(int((1 - rate) * 2**32), 1) - 1)
    return is_kept


def _typed(keys: jax.Array) -> jax.Array:
    typed: jax.Array = jax.random.wrap_key_data(keys, impl="threefry2x32")
    return typed
