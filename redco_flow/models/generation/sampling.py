"""Draw next tokens at random: temperature, the k likeliest, the likeliest that make up p.

Each row carries its own key, folded with the position: what it draws depends on nothing beside it,
not on the batch, its order or its size.
Dims in this file: B batch, V vocabulary, C candidates.
Source: Holtzman et al. 2020 for top-p; the order of the three as in transformers.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from redco_flow.engine.random import fold_in, random_bits

# Beyond all positions, which are folded into the same keys.
_SEQUENCES = 1 << 30


@dataclass(frozen=True)
class Sampling:
    """Changes of the model's distribution before a token is drawn from it.

    Attributes:
        temperature: what logits are divided by; towards 0 the likeliest token wins.
        top_k: only this number of the likeliest tokens may be drawn; None: all.
        top_p: of those, only the fewest likeliest whose probabilities reach this sum.

    Raises:
        ValueError: a number out of its range.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(
                f"temperature is {self.temperature}; it must be above 0 (greedy search is no "
                "sampling at all)."
            )
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k is {self.top_k}; it must be at least 1, or none.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; it must be in (0, 1].")


def candidates(logits: jax.Array, how: Sampling) -> tuple[jax.Array, jax.Array]:
    """Return the tokens that may be drawn (B, C) and their logits below the largest's, 0.

    Hidden ones have minus infinity.

    All tokens in their own order where neither top-k nor top-p narrows them; else the likeliest
    first.
    """
    largest = jnp.max(logits, axis=-1, keepdims=True)
    scaled = (logits - largest) / max(how.temperature, float(np.finfo(np.float32).tiny))
    vocab_size = logits.shape[-1]
    if how.top_k is None and how.top_p == 1:
        tokens = jnp.broadcast_to(jnp.arange(vocab_size), logits.shape)
        return tokens, scaled
    best, tokens = jax.lax.top_k(scaled, min(how.top_k or vocab_size, vocab_size))
    probabilities = jax.nn.softmax(best, axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    return tokens, jnp.where(before < how.top_p, best, -jnp.inf)


def keys_of_sequences(keys: jax.Array, num_sequences: int) -> jax.Array:
    """Return keys (B N, 2) for N texts of each row, of which the first has the row's own."""
    if num_sequences == 1:
        return keys
    others = [fold_in(keys, _SEQUENCES + number) for number in range(1, num_sequences)]
    return jnp.stack([keys, *others], axis=1).reshape(-1, keys.shape[-1])


def draw(logits: jax.Array, position: jax.Array, keys: jax.Array, how: Sampling) -> jax.Array:
    """Draw a token (B,) from each row of logits (B, V) float32.

    Args:
        keys: raw keys (B, 2).
    """
    tokens, kept = candidates(logits, how)
    bits = random_bits(fold_in(keys, position), (kept.shape[-1],))
    # 23 bits, in the middle of their interval: never 0 or 1, where the logarithm is infinite.
    uniform = ((bits >> np.uint32(9)).astype(jnp.float32) + 0.5) * np.float32(2.0**-23)
    # The largest sum of a logit and Gumbel noise falls on each with its own probability.
    place = jnp.argmax(kept - jnp.log(-jnp.log(uniform)), axis=-1)
    return jnp.take_along_axis(tokens, place[:, None], axis=-1)[:, 0]
