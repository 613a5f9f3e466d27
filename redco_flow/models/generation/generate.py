"""Generate texts: greedily, by beam search or by sampling, for any model with a cache.

Pure functions, to be jitted as a whole. A row's result does not depend on the rows beside it.
Encoder-decoders read a source and begin with their start token; decoder-only models read a prompt,
padded on either side, and begin with its last token.
Dims in this file: B batch, S source or prompt, N beams.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from redco_flow.engine.random import example_keys
from redco_flow.models.attention.context import num_context_shards
from redco_flow.models.generation.beam import EarlyStopping, beam_search
from redco_flow.models.generation.greedy import (
    Generated,
    Growth,
    OnToken,
    ProcessScores,
    segment_length,
    token_search,
)
from redco_flow.models.generation.logits_processors import (
    LogitsProcessing,
    ReadTokens,
    processor,
    read_prompts,
    read_start_token,
)
from redco_flow.models.generation.sampling import Sampling, draw, keys_of_sequences


class ForcedTokens(NamedTuple):
    """The tokens that have to come first and last; None: any.

    The last counts where there is room for one token only.
    """

    first: int | None = None
    last: int | None = None

    @classmethod
    def of(cls, config: Any) -> ForcedTokens:
        """Return what a family's config says, if it is one that says such things.

        Of several last tokens it is the lowest, with log-probability 0. transformers gives each of
        them 0: its greedy text and the best of its beams are the same, its other beams may not be.
        """
        last = getattr(config, "forced_eos_token_id", None)
        last = min(last, default=None) if isinstance(last, tuple) else last
        return cls(getattr(config, "forced_bos_token_id", None), last)


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
        return _force(logits, position, forced, max_new_tokens), cache

    return step


def _force(
    logits: jax.Array, position: jax.Array, forced: ForcedTokens, max_new_tokens: int
) -> jax.Array:
    for token, place in ((forced.first, 0), (forced.last, max_new_tokens - 1)):
        if token is not None:
            only = jnp.where(jnp.arange(logits.shape[-1]) == token, 0.0, -jnp.inf)
            logits = jnp.where(position == place, only, logits)
    return logits


__all__ = [
    "Generated",
    "LogitsProcessing",
    "Sampling",
    "beam_search",
    "generate",
    "token_search",
]


def generate(
    model: Any,
    config: Any,
    params: Any,
    input_ids: jax.Array,
    attention_mask: jax.Array,
    *,
    max_new_tokens: int,
    num_beams: int = 1,
    length_penalty: float = 1.0,
    early_stopping: EarlyStopping = False,
    sampling: Sampling | None = None,
    processing: LogitsProcessing | None = None,
    num_return_sequences: int = 1,
    rngs: jax.Array | None = None,
    on_token: OnToken | None = None,
) -> Generated:
    """Read sources or prompts and search for what follows; pure, to be jitted as a whole.

    Args:
        model: a family, as `models.find.find_model` returns it.
        input_ids, attention_mask: (B, S); rows of any lengths, mask 0 is padding.
        max_new_tokens: the end token included.
        num_beams: 1 is greedy search; the next two count only above that.
        sampling: draw tokens instead of searching for the likeliest.
        processing: what makes tokens less likely by the text so far, or impossible.
        num_return_sequences: of each row: the best of the beams, or as many draws, of which the
            first is the one that would be drawn alone. More than one gives tokens (B, N, T).
        rngs: (B,) keys, one per row, for sampling only.
        on_token: called on the host with each token as it is chosen; may end texts.

    Raises:
        ValueError: a count below 1; sampling, or `on_token`, with beams; sampling without keys;
            more sequences than beams; more tokens at least than at most; a model that does not
            generate; or a mesh that splits sequences.
    """
    processing = processing or LogitsProcessing()
    _check(
        model,
        str(getattr(config, "model_type", model)),
        max_new_tokens=max_new_tokens,
        num_beams=num_beams,
        num_return_sequences=num_return_sequences,
    )
    _check_minimum(processing, max_new_tokens)
    search: Any = partial(token_search, on_token=on_token)
    num_texts = num_beams
    if sampling is not None:
        num_texts = num_return_sequences
        keys = _drawing_keys(num_beams, rngs, len(input_ids), num_return_sequences)
        choose = partial(draw, keys=keys, how=sampling)
        search = partial(search, choose=choose)
    elif num_return_sequences > num_beams:
        raise ValueError(
            f"num_return_sequences is {num_return_sequences}, and num_beams is {num_beams}: there "
            "are as many texts as beams; sample, or search with more beams."
        )
    elif num_beams > 1:
        if on_token is not None:
            raise ValueError("beam search knows its tokens at the end: leave on_token out.")
        search = partial(
            beam_search,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
            num_return_sequences=num_return_sequences,
        )
    if hasattr(model, "decoding_params"):
        params = model.decoding_params(config, params)
    start = _start_decoder_only if hasattr(model, "prefill") else _start_encoder_decoder
    growth = _growth(model, segment_length(max_new_tokens, num_texts, input_ids.shape[1]))
    cache, read, special_tokens = start(
        model,
        config,
        params,
        input_ids,
        attention_mask,
        num_beams=num_texts,
        max_length=max_new_tokens,
        **({} if growth is None else {"room": growth.room}),
    )
    step = partial(model.decode_step, config, params)
    forced = ForcedTokens.of(config)
    process = processor(processing, read, special_tokens["eos_token_id"])
    found: Generated = search(
        with_forced_tokens(step, forced, max_new_tokens),
        cache,
        max_new_tokens=max_new_tokens,
        growth=growth,
        process=_forcing_last(process, forced, max_new_tokens),
        **special_tokens,
    )
    if sampling is None or num_return_sequences == 1:
        return found
    by_row = (len(input_ids), num_return_sequences)
    return Generated(found.tokens.reshape(*by_row, -1), found.scores.reshape(by_row))


def _growth(model: Any, room: int) -> Growth | None:
    grow = getattr(model, "grow_cache", None)
    return None if grow is None else Growth(room, grow)


def _check(model: Any, name: str, **counts: int) -> None:
    if num_context_shards() > 1:
        raise ValueError(
            f"the mesh splits sequences over {num_context_shards()} context shards, and "
            "generating takes token after token, which cannot be split: generate on "
            "deployer.without_context_shards(), where the parameters lie as they are."
        )
    if not hasattr(model, "decode_step"):
        raise ValueError(f"{name} does not generate: it has no decode_step.")
    for what, count in counts.items():
        if count < 1:
            raise ValueError(f"{what} is {count}; it must be at least 1.")


def _check_minimum(processing: LogitsProcessing, max_new_tokens: int) -> None:
    if processing.min_new_tokens > max_new_tokens:
        raise ValueError(
            f"min_new_tokens is {processing.min_new_tokens}, and at most {max_new_tokens} are "
            "generated."
        )


def _forcing_last(
    process: ProcessScores | None, forced: ForcedTokens, max_new_tokens: int
) -> ProcessScores | None:
    """Let forced tokens win over what a processor forbids."""
    if process is None or forced == ForcedTokens():
        return process

    def process_and_force(scores: jax.Array, tokens: jax.Array, position: jax.Array) -> jax.Array:
        return _force(process(scores, tokens, position), position, forced, max_new_tokens)

    return process_and_force


def _drawing_keys(
    num_beams: int, rngs: jax.Array | None, num_rows: int, num_sequences: int
) -> jax.Array:
    if num_beams > 1:
        raise ValueError(f"num_beams is {num_beams}; sampling follows one hypothesis per row.")
    keys = example_keys(rngs, num_rows)
    if keys is None:
        raise ValueError("sampling needs rngs: one key per row.")
    return keys_of_sequences(keys, num_sequences)


def _start_encoder_decoder(
    model: Any,
    config: Any,
    params: Any,
    input_ids: jax.Array,
    attention_mask: jax.Array,
    **size: int,
) -> tuple[Any, ReadTokens, dict[str, Any]]:
    encoded = model.encode(config, params, input_ids, attention_mask)
    cache = model.init_cache(config, params, encoded, attention_mask, **size)
    read = read_start_token(config.decoder_start_token_id, len(input_ids))
    return (
        cache,
        read,
        {
            "start_token_id": config.decoder_start_token_id,
            "eos_token_id": config.eos_token_id,
            "pad_token_id": config.pad_token_id,
        },
    )


def _start_decoder_only(
    model: Any,
    config: Any,
    params: Any,
    input_ids: jax.Array,
    attention_mask: jax.Array,
    **size: int,
) -> tuple[Any, ReadTokens, dict[str, Any]]:
    cache = model.prefill(config, params, input_ids, attention_mask, **size)
    return (
        cache,
        read_prompts(input_ids, attention_mask),
        {
            "start_token_id": cache.source.last_token,
            "eos_token_id": config.eos_token_ids,
            "pad_token_id": config.filler_token_id,
        },
    )
