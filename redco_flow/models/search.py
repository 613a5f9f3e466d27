"""What every search over next tokens shares: the model's step, its cache, the result.

Dims in this file: B batch, N beams, T new tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp

# One token id, or several of which each ends a text.
EndTokens = int | tuple[int, ...]


class BeamCache(Protocol):
    """A model's cache: a named tuple in which beams are one field.

    `beams` is a tree whose every leaf has dims (B, N, …): what differs between the hypotheses of
    a source. Everything else in the cache stays as it is.
    """

    @property
    def beams(self) -> Any:
        """The part that is reordered."""

    def _replace(self, **fields: Any) -> Any: ...


CacheT = TypeVar("CacheT", bound=BeamCache)
DecodeStep = Callable[[CacheT, jax.Array, jax.Array], tuple[jax.Array, CacheT]]


class Generated(NamedTuple):
    """The best sequence found for each row.

    Attributes:
        tokens: (B, T) int32 without the start token or the prompt; padding after the end token.
        scores: (B,) float32 log-probability, over length ** length_penalty for beam search.
    """

    tokens: jax.Array
    scores: jax.Array


def batch_and_beams(cache: Any) -> tuple[int, int]:
    """Return B and N."""
    batch_size, num_beams = jax.tree.leaves(cache.beams)[0].shape[:2]
    return batch_size, num_beams


def start_tokens(start: int | jax.Array, batch_size: int, num_beams: int) -> jax.Array:
    """Return the first inputs (B, N): one token for all rows, or each row's own (B,)."""
    each_row = jnp.broadcast_to(jnp.asarray(start, jnp.int32), (batch_size,))
    return jnp.broadcast_to(each_row[:, None], (batch_size, num_beams))


def is_end(tokens: jax.Array, eos_token_id: EndTokens) -> jax.Array:
    """Return which tokens end a text."""
    ends = eos_token_id if isinstance(eos_token_id, tuple) else (eos_token_id,)
    return jnp.any(tokens[..., None] == jnp.asarray(ends, tokens.dtype), axis=-1)
