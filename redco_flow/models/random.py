"""JAX's threefry bits, written as one elementwise expression.

The same numbers as `jax.random.bits` and `jax.random.normal`, but in a form that compilers fuse
with what uses them: on CPUs JAX's own is a loop over whole arrays, ten times slower to run (a
quarter of a training step with dropout) and several times slower to compile.
Source: Salmon et al. 2011, Threefry-2x32 with 20 rounds; the key schedule and counters are
those of JAX with `jax_threefry_partitionable`.
"""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = np.uint32(0x1BD11BDA)
_FLOAT_ONE_BITS = np.uint32(0x3F800000)

Words = tuple[jax.Array, jax.Array]


@jax.jit
def fold_in(keys: jax.Array, data: int | jax.Array) -> jax.Array:
    """Derive keys (…, 2) from raw keys (…, 2), as `jax.random.fold_in` does."""
    data = jnp.asarray(data, jnp.uint32)
    first, second = _threefry(_words(keys), (jnp.zeros_like(data), data))
    # Else it is fused into what draws from the key, and computed again for every element.
    folded: jax.Array = jax.lax.optimization_barrier(jnp.stack([first, second], axis=-1))
    return folded


def random_bits(
    keys: jax.Array, shape: tuple[int, ...], *, stream: int | jax.Array = 0
) -> jax.Array:
    """Draw uint32 (…, *shape) from raw keys (…, 2).

    Args:
        stream: which of a key's 2^32 independent draws; 0 is what `jax.random.bits` draws.

    Raises:
        ValueError: 2^32 elements per key or more; give each layer its own key.
    """
    check_num_elements(shape)
    bits: jax.Array = _stream_bits(keys, jnp.asarray(stream, jnp.uint32), shape)
    return bits


def check_num_elements(shape: tuple[int, ...]) -> None:
    """Raise ValueError for 2^32 elements per key or more."""
    if math.prod(shape) >= 1 << 32:
        raise ValueError(f"random_bits: {shape} has 2^32 elements or more for one key.")


@jax.jit
def random_bits_at(keys: jax.Array, places: jax.Array, stream: int | jax.Array) -> jax.Array:
    """Draw those of a larger array's bits that are asked for, uint32 (…, *places' shape).

    Args:
        places: uint32, of the elements in the larger array, counted row by row.
        stream: see `random_bits`.
    """
    return _bits_at(keys, jnp.asarray(stream, jnp.uint32), places)


# Jitted so that twenty rounds are traced once per shape, not once per use.
@partial(jax.jit, static_argnums=2)
def _stream_bits(keys: jax.Array, stream: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    counters = jnp.zeros(shape, jnp.uint32)
    stride = 1
    for dim in reversed(range(len(shape))):
        counters += jax.lax.broadcasted_iota(jnp.uint32, shape, dim) * np.uint32(stride)
        stride *= shape[dim]
    return _bits_at(keys, stream, counters)


def _bits_at(keys: jax.Array, stream: jax.Array, counters: jax.Array) -> jax.Array:
    spread = (..., *[None] * counters.ndim)
    first, second = (word[spread] for word in _words(keys))
    one, other = _threefry((first, second), (jnp.broadcast_to(stream, counters.shape), counters))
    return one ^ other


def normal(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Draw float32 standard normals, as `jax.random.normal` does from a raw key (2,)."""
    bits = random_bits(key, shape)
    # 23 random bits as the fraction of a float in [1, 2), then stretched over (-1, 1).
    ones = jax.lax.bitcast_convert_type((bits >> np.uint32(9)) | _FLOAT_ONE_BITS, jnp.float32)
    low = np.nextafter(np.float32(-1), np.float32(0))
    uniform = jnp.maximum(low, (ones - 1) * (1 - low) + low)
    return np.float32(math.sqrt(2)) * jax.lax.erf_inv(uniform)


def _words(keys: jax.Array) -> Words:
    return keys[..., 0], keys[..., 1]


def _threefry(key: Words, counter: Words) -> Words:
    """Encrypt a counter: 20 rounds of add, rotate and xor, the key mixed in after every four."""
    schedule = (*key, key[0] ^ key[1] ^ _PARITY)
    x, y = counter[0] + schedule[0], counter[1] + schedule[1]
    for group in range(5):
        for distance in _ROTATIONS[group % 2]:
            x = x + y
            y = (y << np.uint32(distance)) | (y >> np.uint32(32 - distance))
            y = x ^ y
        x = x + schedule[(group + 1) % 3]
        y = y + schedule[(group + 2) % 3] + np.uint32(group + 1)
    return x, y


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
