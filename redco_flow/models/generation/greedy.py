"""One token at a time: the likeliest, or whichever a rule chooses, for one or more texts per row.

One program of a few loops (`segments`), which end when every row of the batch has. A row's result
does not depend on the rows beside it.
Dims in this file: B batch, N texts per row, R = B N, T new tokens, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

StateT = TypeVar("StateT", bound=Any)

_MAX_SEGMENTS = 4
# Fewer slots, or a smaller part of what was read, save less than a segment costs to compile.
_MIN_SLOTS = 128
_MIN_SHARE = 1 / 8


class Growth(NamedTuple):
    """The growth of a cache.

    Attributes:
        room: for how many new tokens there is room at first, and how many more each time.
        grow: (cache, number of tokens) to a cache with room for that number.
    """

    room: int
    grow: Callable[[Any, int], Any]


def segment_length(max_new_tokens: int, num_beams: int, num_read: int) -> int:
    """Return how many new tokens a segment has; only the last one may have fewer.

    Args:
        num_read: tokens of the prompt or source, which every new token attends to.
    """
    least = max(_MIN_SLOTS, math.ceil(num_read * _MIN_SHARE))
    num_segments = min(max(max_new_tokens * num_beams // least, 1), _MAX_SEGMENTS)
    return math.ceil(max_new_tokens / num_segments)


def run_segments(
    is_open: Callable[[StateT], jax.Array],
    advance: Callable[[StateT], StateT],
    state: StateT,
    max_new_tokens: int,
    growth: Growth | None,
) -> StateT:
    """Advance a search while it is open and has fewer tokens, and let its cache grow on the way.

    Args:
        state: a named tuple with `position`, the number of tokens so far, and `cache`.
        growth: None: the cache has room for all tokens.
    """

    def run_to(end: int, state: StateT) -> StateT:
        return jax.lax.while_loop(
            lambda state: (state.position < end) & is_open(state), advance, state
        )

    if growth is None:
        return run_to(max_new_tokens, state)
    for end in range(growth.room, max_new_tokens, growth.room):
        state = run_to(end, state)
        next_end = min(end + growth.room, max_new_tokens)
        state = state._replace(cache=growth.grow(state.cache, next_end))
    return run_to(max_new_tokens, state)


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
    """The best sequence found for each row, or several.

    Attributes:
        tokens: (B, T) int32 without the start token or the prompt; padding after the end token.
            (B, N, T) where several sequences were asked for.
        scores: (B,) or (B, N), float32 log-probability, over length ** length_penalty for beam
            search.
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


# (logits (R, V) float32, position) to tokens (R,).
ChooseToken = Callable[[jax.Array, jax.Array], jax.Array]
# (scores (B, N, V) float32, new tokens so far (B, N, T), position) to scores (B, N, V).
ProcessScores = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
# On the host: (tokens (R,), position) to (R,) bool: which texts end with this token.
OnToken = Callable[[np.ndarray, np.ndarray], np.ndarray]


class _State(NamedTuple):
    position: jax.Array
    last: jax.Array  # (B, N)
    tokens: jax.Array  # (R, T)
    scores: jax.Array  # (R,)
    ended: jax.Array  # (R,)
    cache: Any


def likeliest(logits: jax.Array, _: Any = None) -> jax.Array:
    """Return the place of the largest of each row (B, V), the first of equals.

    A maximum and a minimum are vectorised where an argmax, one reduction of pairs, is not.
    """
    last = logits.shape[-1] - 1
    places = jnp.arange(last + 1, dtype=jnp.int32)
    is_largest = logits == jnp.max(logits, axis=-1, keepdims=True)
    return jnp.min(jnp.where(is_largest, places, last), axis=-1)


def token_search(
    decode_step: DecodeStep[CacheT],
    cache: CacheT,
    choose: ChooseToken = likeliest,
    *,
    max_new_tokens: int,
    start_token_id: int | jax.Array,
    eos_token_id: EndTokens,
    pad_token_id: int,
    growth: Growth | None = None,
    process: ProcessScores | None = None,
    on_token: OnToken | None = None,
) -> Generated:
    """Decode N texts of each row side by side, each token chosen by `choose`.

    Args:
        decode_step: (cache, tokens (B, N), position) to (logits (B, N, V), cache).
        cache: with N beams, which are never reordered.
        growth: how the cache grows; None: it has room for all tokens.
        start_token_id: one for all rows, or each row's own (B,).
        process: changes the scores that `choose` is given.
        on_token: called on the host with each token as it is chosen; may end texts.

    Returns:
        the tokens (R, T); scores (R,) are the model's own log-probabilities of them, however
        chosen.
    """
    batch_size, num_texts = batch_and_beams(cache)
    num_rows = batch_size * num_texts

    def advance(state: _State) -> _State:
        logits, cache = decode_step(state.cache, state.last, state.position)
        scores = logits.reshape(num_rows, -1).astype(jnp.float32)
        offered = scores
        if process is not None:
            by_row = (batch_size, num_texts, -1)
            tokens = state.tokens.reshape(by_row)
            offered = process(scores.reshape(by_row), tokens, state.position)
            offered = offered.reshape(scores.shape)
        best = choose(offered, state.position).astype(jnp.int32)
        chosen = jnp.take_along_axis(scores, best[:, None], axis=-1)[:, 0]
        gained = chosen - jax.nn.logsumexp(scores, axis=-1)
        token = jnp.where(state.ended, pad_token_id, best)
        ended = state.ended | is_end(token, eos_token_id)
        if on_token is not None:
            shape = jax.ShapeDtypeStruct(ended.shape, jnp.bool_)
            ended |= io_callback(on_token, shape, token, state.position)
        return _State(
            position=state.position + 1,
            last=token.reshape(batch_size, num_texts),
            tokens=jax.lax.dynamic_update_slice(state.tokens, token[:, None], (0, state.position)),
            scores=state.scores + jnp.where(state.ended, 0.0, gained),
            ended=ended,
            cache=cache,
        )

    first = _State(
        position=jnp.zeros((), jnp.int32),
        last=start_tokens(start_token_id, batch_size, num_texts),
        tokens=jnp.full((num_rows, max_new_tokens), pad_token_id, jnp.int32),
        scores=jnp.zeros((num_rows,), jnp.float32),
        ended=jnp.zeros((num_rows,), bool),
        cache=cache,
    )
    last = run_segments(lambda state: ~jnp.all(state.ended), advance, first, max_new_tokens, growth)
    return Generated(last.tokens, last.scores)
