"""Change the scores of next tokens by the text so far: transformers' logits processors.

`repetition_penalty`, `no_repeat_ngram_size` and `min_new_tokens`, in that order. Where none of them
is set there is no processor, and the compiled program is that without this module.
Dims in this file: B batch, N beams, P tokens before the first new one, T new tokens, H = P + T,
V vocabulary.
Source: transformers 5.23, `generation/logits_process.py`; differs: n-grams are those of the row's
own tokens, so padding in front of a prompt repeats nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from redco_flow.models.generation.greedy import EndTokens, ProcessScores, is_end


@dataclass(frozen=True)
class LogitsProcessing:
    """Penalties and bans that make tokens less likely, or impossible.

    Attributes:
        repetition_penalty: scores of tokens that the text has are divided by it where they are
            positive and multiplied by it where they are negative; 1 changes nothing.
        no_repeat_ngram_size: no run of this number of tokens occurs twice in a text; 0: any may.
        min_new_tokens: no text ends before it has this number of new tokens.

    A text is a decoder-only model's prompt with what follows; an encoder-decoder's is its target,
    which begins with the start token.

    Raises:
        ValueError: a number out of its range.
    """

    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    min_new_tokens: int = 0

    def __post_init__(self) -> None:
        if not self.repetition_penalty > 0:
            raise ValueError(
                f"repetition_penalty is {self.repetition_penalty}; it must be above 0 (1 changes "
                "nothing, more makes repetitions less likely)."
            )
        for name in ("no_repeat_ngram_size", "min_new_tokens"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 0.")


class ReadTokens(NamedTuple):
    """The tokens before the first new token.

    Attributes:
        ids: (B, P); a row's tokens end at P.
        is_text: (B, P); False is padding, in front.
    """

    ids: jax.Array
    is_text: jax.Array


def read_prompts(input_ids: jax.Array, attention_mask: jax.Array) -> ReadTokens:
    """Return prompts (B, S) that are padded on either side with the padding in front."""
    length = input_ids.shape[1]
    last = jnp.max(jnp.where(attention_mask != 0, jnp.arange(length), 0), axis=1)
    places = jnp.arange(length) - (length - 1 - last[:, None])
    ids, is_text = (
        jnp.take_along_axis(each, jnp.maximum(places, 0), axis=1)
        for each in (input_ids, attention_mask != 0)
    )
    return ReadTokens(ids, is_text & (places >= 0))


def read_start_token(start_token_id: int, batch_size: int) -> ReadTokens:
    """Return the one token that an encoder-decoder's targets begin with."""
    ids = jnp.full((batch_size, 1), start_token_id, jnp.int32)
    return ReadTokens(ids, jnp.ones_like(ids, bool))


def processor(
    how: LogitsProcessing, read: ReadTokens, eos_token_id: EndTokens
) -> ProcessScores | None:
    """Return the function that changes scores; None where nothing is to be changed."""
    if how == LogitsProcessing():
        return None

    def process(scores: jax.Array, tokens: jax.Array, position: jax.Array) -> jax.Array:
        text, is_text = _text_so_far(read, tokens, position)
        vocab_size = scores.shape[-1]
        if how.repetition_penalty != 1:
            scores = _penalised(scores, _marked(text, is_text, vocab_size), how.repetition_penalty)
        if 0 < how.no_repeat_ngram_size <= text.shape[-1]:
            length = read.ids.shape[1] + position
            repeats = _completing_ngrams(
                text, is_text, length, how.no_repeat_ngram_size, vocab_size
            )
            scores = jnp.where(repeats, -jnp.inf, scores)
        if how.min_new_tokens:
            ends = is_end(jnp.arange(vocab_size), eos_token_id)
            scores = jnp.where(ends & (position < how.min_new_tokens), -jnp.inf, scores)
        return scores

    return process


def _text_so_far(
    read: ReadTokens, tokens: jax.Array, position: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return each hypothesis' ids (B, N, H), and which of them are tokens of its text."""
    shape = (*tokens.shape[:2], read.ids.shape[1])
    is_written = jnp.broadcast_to(jnp.arange(tokens.shape[2]) < position, tokens.shape)
    before = [jnp.broadcast_to(each[:, None], shape) for each in read]
    return (
        jnp.concatenate([before[0].astype(tokens.dtype), tokens], axis=2),
        jnp.concatenate([before[1], is_written], axis=2),
    )


def _marked(ids: jax.Array, is_meant: jax.Array, vocab_size: int) -> jax.Array:
    """Return (B, N, V): which tokens are among the ids (B, N, …) that are meant."""

    def mark(ids: jax.Array, is_meant: jax.Array) -> jax.Array:
        return jnp.zeros((vocab_size,), bool).at[ids].max(is_meant, mode="drop")

    marked: jax.Array = jax.vmap(jax.vmap(mark))(ids, is_meant)
    return marked


def _penalised(scores: jax.Array, is_seen: jax.Array, penalty: float) -> jax.Array:
    lowered = jnp.where(scores < 0, scores * penalty, scores / penalty)
    return jnp.where(is_seen, lowered, scores)


def _completing_ngrams(
    text: jax.Array, is_text: jax.Array, length: jax.Array, size: int, vocab_size: int
) -> jax.Array:
    """Return (B, N, V): which tokens would complete a run of `size` tokens that the text has.

    Args:
        text, is_text: (B, N, H).
        length: up to where the text reaches.
    """
    num_starts = text.shape[-1] - size + 1
    last = jax.lax.dynamic_slice_in_dim(text, length - (size - 1), size - 1, axis=2)
    # A text's tokens are in a row: where the first and the last are its, those between are.
    is_same = is_text[..., :num_starts] & is_text[..., size - 1 :]
    for place in range(size - 1):
        is_same &= text[..., place : place + num_starts] == last[..., place : place + 1]
    return _marked(text[..., size - 1 :], is_same, vocab_size)
