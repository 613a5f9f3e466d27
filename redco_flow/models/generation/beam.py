"""Beam search: the N likeliest hypotheses of each row run on, the best that ended are returned.

One program of a few loops (`segments`), which end when every row of the batch has. The semantics
are those of transformers' `generate` (`num_beams`, `length_penalty`, `early_stopping`), token for
token. Calls the model's `decode_step` and reorders `cache.beams`.
Dims in this file: B batch, N beams, C candidates, T new tokens, V vocabulary.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from redco_flow.models.generation.greedy import (
    CacheT,
    DecodeStep,
    EndTokens,
    Generated,
    Growth,
    ProcessScores,
    batch_and_beams,
    is_end,
    run_segments,
    start_tokens,
)

# True: stop with the first N that ended. False: when the best running one, at its present length,
# is no better than the worst of them. "never": when it could not be at any length.
EarlyStopping = bool | Literal["never"]

# What transformers gives to hypotheses that must not win.
_LOWEST = -1.0e9


class _Beams(NamedTuple):
    position: jax.Array
    last: jax.Array  # (B, N)
    tokens: jax.Array  # (B, N, T) of the hypotheses that run on
    scores: jax.Array  # (B, N) their log-probabilities
    done_tokens: jax.Array  # (B, N, T) of the best that have ended
    done_scores: jax.Array  # (B, N) normalised by length
    is_done: jax.Array  # (B, N) whether that place is taken
    can_improve: jax.Array  # (B, 1) whether running ones may still beat ended ones
    cache: Any


def beam_search(
    decode_step: DecodeStep[CacheT],
    cache: CacheT,
    *,
    max_new_tokens: int,
    start_token_id: int | jax.Array,
    eos_token_id: EndTokens,
    pad_token_id: int,
    length_penalty: float = 1.0,
    early_stopping: EarlyStopping = False,
    num_return_sequences: int = 1,
    growth: Growth | None = None,
    process: ProcessScores | None = None,
) -> Generated:
    """Keep the N likeliest hypotheses and return the best that ended.

    Args:
        decode_step: (cache, tokens (B, N), position) to (logits (B, N, V), cache).
        cache: with N beams.
        start_token_id: one for all rows, or each row's own (B,).
        length_penalty: exponent of the length that scores are divided by; > 0 favours long ones.
        early_stopping: True stops a row as soon as N hypotheses have ended; False when the best
            running one, at its present length, is no better than the worst of them; "never" when
            it could not be at the length that favours it most.
        num_return_sequences: more than one gives (B, R, T), the best first; at most N.
        growth: how the cache grows; None: it has room for all tokens.
        process: changes the log-probabilities of next tokens.
    Source: transformers 5.23, GenerationMixin._beam_search; differs: cross-attention's keys and
        values are held once per row, and each beam offers its own best tokens only.
    """
    batch_size, num_beams = batch_and_beams(cache)
    lengths = np.arange(1, max_new_tokens + 1, dtype=np.float64)
    # Enough that N of them run on even if each beam's best all end it.
    num_ends = len(eos_token_id) if isinstance(eos_token_id, tuple) else 1
    num_candidates = max(2, 1 + num_ends) * num_beams
    normalisers = jnp.asarray(lengths**length_penalty, jnp.float32)
    stops_when_full = early_stopping is True
    hopes_for_length = early_stopping == "never" and length_penalty > 0

    def advance(state: _Beams) -> _Beams:
        logits, cache = decode_step(state.cache, state.last, state.position)
        candidates = _best_candidates(*_log_probabilities(logits, state, process), num_candidates)
        tokens = _extend(state.tokens, candidates, state.position)
        is_last = state.position + 1 >= max_new_tokens
        ends = is_end(candidates.token, eos_token_id) | is_last
        # Candidates beyond the first N are there to run on, not to end.
        may_end = ends & (jnp.arange(num_candidates) < num_beams)
        normaliser = normalisers[state.position]
        scores = candidates.score / normaliser
        state = _keep_best(state, tokens, scores, may_end, stops_when_full=stops_when_full)
        hoped = normalisers[-1] if hopes_for_length else normaliser
        return _run_on(state, candidates, tokens, ends, hoped, cache)

    start = start_tokens(start_token_id, batch_size, num_beams)
    first = _first_beams(cache, start, max_new_tokens, pad_token_id)
    is_open = partial(_is_open, stops_when_full=stops_when_full)
    last = run_segments(is_open, advance, first, max_new_tokens, growth)
    if num_return_sequences == 1:
        return Generated(last.done_tokens[:, 0], last.done_scores[:, 0])
    kept = slice(num_return_sequences)
    return Generated(last.done_tokens[:, kept], last.done_scores[:, kept])


class _Candidates(NamedTuple):
    score: jax.Array  # (B, C) log-probability of the whole hypothesis, best first
    beam: jax.Array  # (B, C) which it continues
    token: jax.Array  # (B, C) with which token


def _log_probabilities(
    logits: jax.Array, state: _Beams, process: ProcessScores | None
) -> tuple[jax.Array, jax.Array]:
    """Return scores (B, N, V) of next tokens, and what is to be added to a beam's (B, N)."""
    logits = logits.astype(jnp.float32)
    normaliser = jax.nn.logsumexp(logits, axis=-1)
    if process is None:
        return logits, state.scores - normaliser
    log_probs = logits - normaliser[:, :, None]
    return process(log_probs, state.tokens, state.position), state.scores


def _best_candidates(logits: jax.Array, to_add: jax.Array, count: int) -> _Candidates:
    """Return the `count` best continuations of all beams of a row.

    Each beam's own best first, then the best of those: neither the row's N * V scores nor the
    log-probabilities of the whole vocabulary are formed. Ties go to the lower beam, then to the
    lower token.
    """
    batch_size, _, vocab_size = logits.shape
    per_beam = min(count, vocab_size)
    best, token = jax.lax.top_k(logits, per_beam)
    best += to_add[:, :, None]
    best, token = best.reshape(batch_size, -1), token.reshape(batch_size, -1)
    score, place = jax.lax.top_k(best, count)
    return _Candidates(
        score=score,
        beam=place // per_beam,
        token=jnp.take_along_axis(token, place, axis=1).astype(jnp.int32),
    )


def _extend(tokens: jax.Array, candidates: _Candidates, position: jax.Array) -> jax.Array:
    """Return each candidate's tokens so far: (B, N, T) to (B, C, T)."""
    parents = jnp.take_along_axis(tokens, candidates.beam[:, :, None], axis=1)
    return jax.lax.dynamic_update_slice(parents, candidates.token[:, :, None], (0, 0, position))


def _keep_best(
    state: _Beams,
    tokens: jax.Array,
    scores: jax.Array,
    may_end: jax.Array,
    *,
    stops_when_full: bool,
) -> _Beams:
    """Merge the candidates that end now into the N best that have ended.

    Args:
        tokens, scores, may_end: of the candidates; scores are normalised by length.
    """
    blocked = ~state.can_improve | (jnp.all(state.is_done, 1, keepdims=True) & stops_when_full)
    scores = scores + jnp.where(blocked, _LOWEST, 0.0)
    scores = jnp.where(may_end, scores, scores + _LOWEST)
    all_scores = jnp.concatenate([state.done_scores, scores], axis=1)
    all_tokens = jnp.concatenate([state.done_tokens, tokens], axis=1)
    all_done = jnp.concatenate([state.is_done, may_end], axis=1)
    kept_scores, kept = jax.lax.top_k(all_scores, state.done_scores.shape[1])
    return state._replace(
        done_scores=kept_scores,
        done_tokens=jnp.take_along_axis(all_tokens, kept[:, :, None], axis=1),
        is_done=jnp.take_along_axis(all_done, kept, axis=1),
    )


def _run_on(
    state: _Beams,
    candidates: _Candidates,
    tokens: jax.Array,
    ends: jax.Array,
    normaliser: jax.Array,
    cache: Any,
) -> _Beams:
    """Go on with the N best candidates that do not end, whose tokens and cache these are.

    Args:
        normaliser: of the length at which the best of them is compared with those that ended.
    """
    running = jnp.where(ends, candidates.score + _LOWEST, candidates.score)
    scores, chosen = jax.lax.top_k(running, state.scores.shape[1])
    worst_done = jnp.where(state.is_done, state.done_scores.min(1, keepdims=True), _LOWEST)
    could_win = jnp.any(scores[:, :1] / normaliser > worst_done, axis=1, keepdims=True)
    parents = jnp.take_along_axis(candidates.beam, chosen, axis=1)
    return state._replace(
        position=state.position + 1,
        last=jnp.take_along_axis(candidates.token, chosen, axis=1),
        tokens=jnp.take_along_axis(tokens, chosen[:, :, None], axis=1),
        scores=scores,
        can_improve=state.can_improve & could_win,
        cache=_reorder(cache, parents),
    )


def _is_open(state: _Beams, *, stops_when_full: bool) -> jax.Array:
    """Say whether a row of the batch may still come to a better text."""
    rows = state.can_improve[:, 0]
    if stops_when_full:
        rows &= ~jnp.all(state.is_done, axis=1)
    return jnp.any(rows)


def _reorder(cache: Any, parents: jax.Array) -> Any:
    """Give beam n the cached past of beam `parents[:, n]`."""

    def pick(leaf: jax.Array) -> jax.Array:
        index = parents.reshape(*parents.shape, *[1] * (leaf.ndim - 2))
        return jnp.take_along_axis(leaf, index, axis=1)

    return cache._replace(beams=jax.tree.map(pick, cache.beams))


def _first_beams(cache: Any, start: jax.Array, max_new_tokens: int, pad_token_id: int) -> _Beams:
    """Return the state before the first token: only one of the equal beams counts."""
    batch_size, num_beams = start.shape
    padding = jnp.full((batch_size, num_beams, max_new_tokens), pad_token_id, jnp.int32)
    return _Beams(
        position=jnp.zeros((), jnp.int32),
        last=start,
        tokens=padding,
        scores=jnp.full(start.shape, _LOWEST, jnp.float32).at[:, 0].set(0.0),
        done_tokens=padding,
        done_scores=jnp.full(start.shape, _LOWEST, jnp.float32),
        is_done=jnp.zeros(start.shape, bool),
        can_improve=jnp.ones((batch_size, 1), bool),
        cache=cache,
    )
