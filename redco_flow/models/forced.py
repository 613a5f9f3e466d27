"""Tokens that a text has to begin or to end with, whatever the model would rather say.

A forced token is certain, so it adds nothing to a text's score, as in transformers' beam search.
Dims in this file: B batch, N beams, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from redco_flow.models.search import EndTokens, is_end


class ForcedTokens(NamedTuple):
    """Which token comes first, and which one (of these) last; None: any.

    The last counts where there is room for one token only.
    """

    first: int | None = None
    last: EndTokens | None = None


def with_forced_tokens(
    decode_step: Callable[..., tuple[jax.Array, Any]], forced: ForcedTokens, max_new_tokens: int
) -> Callable[..., tuple[jax.Array, Any]]:
    """Let nothing else be chosen where a token is forced.

    Args:
        decode_step: (cache, tokens (B, N), position) to (logits (B, N, V), cache).
        max_new_tokens: the last of them is where a text that has not ended is made to.
    """
    if forced == ForcedTokens():
        return decode_step

    def step(cache: Any, tokens: jax.Array, position: jax.Array) -> tuple[jax.Array, Any]:
        logits, cache = decode_step(cache, tokens, position)
        for token, place in ((forced.first, 0), (forced.last, max_new_tokens - 1)):
            if token is not None:
                only = jnp.where(is_end(jnp.arange(logits.shape[-1]), token), 0.0, -jnp.inf)
                logits = jnp.where(position == place, only, logits)
        return logits, cache

    return step
