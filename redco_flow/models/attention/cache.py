"""The keys and values that decoding goes on from: a prompt's, then those of every beam's tokens.

All beams of a row write into one cache, where token t of beam n stands in slot S + t N + n and
stays: which beam wrote each token of a hypothesis is kept apart, and reordering beams reorders
nothing else.
Dims in this file: L layers, B batch, S prompt or source, N beams, T new tokens,
M all slots (S + T N), G key-value groups, K head dim.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from redco_flow.models.attention.balanced_order import SequenceOrder
from redco_flow.models.attention.bias import Bias, Biases
from redco_flow.models.attention.grouped import cap, split_bias, split_groups
from redco_flow.models.attention.rotary import Rotation
from redco_flow.models.config import AttentionConfig
from redco_flow.models.numerics import softmax, wide_einsum

KeysValues = tuple[jax.Array, jax.Array]


class WholeShared(NamedTuple):
    """What all layers share over whole sequences.

    Attributes:
        biases: what rows hide and positions add, each broadcasting to (B, H, T, T).
        rotation: rotary angles of the tokens.
        keys: raw dropout keys (B, 2).
        encoded: another sequence (B, S, D), for cross-attention.
        encoded_bias: what hides its padding, (B, 1, 1, S).
        order: in which the tokens lie; biases are told in the text's.
    """

    biases: Biases
    rotation: Rotation | None
    keys: jax.Array | None
    encoded: jax.Array | None = None
    encoded_bias: Bias | None = None
    order: SequenceOrder = SequenceOrder()


class StepShared(NamedTuple):
    """What all layers share while decoding a token.

    Attributes:
        slot: of the first beam's token in the cache.
        is_visible: (B, N, M) whether a slot may be attended to.
        back: (B, M) how many positions back it stands; needed for windows only.
        rotation: the token's rotary angles.
        encoded_bias: what hides another sequence's padding, (B, 1, 1, S).
        biases: what positions add, each broadcasting to (B, H, N, M).
    """

    slot: jax.Array
    is_visible: jax.Array
    back: jax.Array | None = None
    rotation: Rotation | None = None
    encoded_bias: jax.Array | None = None
    biases: tuple[jax.Array, ...] = ()


class StepLayer(NamedTuple):
    """What one layer has of its own while decoding a token.

    Attributes:
        window: how many tokens back it looks, where layers differ.
        source: keys and values (B, G, S, K) of another sequence.
    """

    window: jax.Array | None = None
    source: KeysValues | None = None


class SourceCache(NamedTuple):
    """What an encoder-decoder needs to decode one more token.

    Attributes:
        source: per source, the same for all its beams and all steps: every cross-attention's
            keys and values, (L, B, G, S, K) each, and the biases that each token meets.
        beams: which beam wrote each token of a hypothesis, (B, N, T): reordered.
        heads: keys and values of all beams' tokens so far, (L, B, G, T N, K) each; they grow.

    Each layer's keys and values stand apart where its parameters do.
    """

    source: dict[str, Any]
    beams: jax.Array
    heads: Any


def with_room(heads: KeysValues, num_places: int) -> KeysValues:
    """Bring keys and values (B, S, G, K) to (B, G, S, K), with so many empty slots behind."""
    key, value = (
        jnp.pad(jnp.swapaxes(each, 1, 2), ((0, 0), (0, 0), (0, num_places), (0, 0)))
        for each in heads
    )
    return key, value


def append(
    cache: KeysValues, heads: KeysValues, layer: jax.Array | None, slot: jax.Array
) -> tuple[KeysValues, KeysValues]:
    """Write a token's keys and values (B, N, G, K) in place; return the cache and the layer's part.

    Args:
        cache: (L, B, G, M, K) each; without L where `layer` is None.
    """
    if layer is None:
        key, value = (_write(*pair, (), slot) for pair in zip(cache, heads, strict=True))
        return (key, value), (key, value)
    keys, values = (_write(*pair, (layer,), slot) for pair in zip(cache, heads, strict=True))
    key, value = (
        jax.lax.dynamic_index_in_dim(each, layer, axis=0, keepdims=False) for each in (keys, values)
    )
    return (keys, values), (key, value)


def _write(
    cache: jax.Array, heads: jax.Array, layer: tuple[jax.Array, ...], slot: jax.Array
) -> jax.Array:
    update = jnp.swapaxes(heads, 1, 2).astype(cache.dtype)
    update = update.reshape(*[1] * len(layer), *update.shape)
    return jax.lax.dynamic_update_slice(cache, update, (*layer, 0, 0, slot, 0))


def no_writers(batch_size: int, num_beams: int, max_length: int) -> jax.Array:
    """Return `writers` (B, N, T) before the first token: which beam wrote each token."""
    return jnp.zeros((batch_size, num_beams, max_length), jnp.int32)


def with_writers(writers: jax.Array, step: jax.Array) -> jax.Array:
    """Say that every beam itself writes the token of this step."""
    _, num_beams, max_length = writers.shape
    beams = jnp.arange(num_beams, dtype=writers.dtype)[:, None]
    return jnp.where(jnp.arange(max_length) == step, beams, writers)


def written(writers: jax.Array, step: jax.Array) -> jax.Array:
    """Return (B, N, T N): whether a slot holds a token of the beam's own hypothesis."""
    batch_size, num_beams, max_length = writers.shape
    is_written = (jnp.arange(max_length) <= step)[:, None]
    is_own = writers[..., None] == jnp.arange(num_beams, dtype=writers.dtype)
    return (is_own & is_written).reshape(batch_size, num_beams, max_length * num_beams)


def places_back(writers: jax.Array, step: jax.Array) -> jax.Array:
    """Return (1, T N): how many positions before this step's token each slot stands."""
    _, num_beams, max_length = writers.shape
    return step - jnp.repeat(jnp.arange(max_length), num_beams)[None]


def attend_cached(
    config: AttentionConfig, query: jax.Array, kept: KeysValues, biases: tuple[jax.Array, ...]
) -> jax.Array:
    """Attend with (B, N, H, K) over keys and values (B, G, M, K), softmax in float32.

    Args:
        biases: float32, added to the scores; each broadcasts to (B, H, N, M).

    Returns:
        (B, N, H, K).
    """
    keys, values = kept
    num_groups = keys.shape[1]
    # Beams and a group's heads are the rows of one product, which is how compilers do it fastest.
    rows = jnp.swapaxes(split_groups(query * config.scale, num_groups), 1, 2)
    lead = rows.shape[:-1]
    scores = wide_einsum("bgqk,bgmk->bgqm", _rows(rows), keys)
    scores = cap(scores, config.cap).reshape(*lead, keys.shape[2])
    for bias in biases:
        scores = scores + jnp.swapaxes(split_bias(bias, num_groups), 2, 3)
    weights = softmax(scores).astype(query.dtype)
    heads = jax.lax.dot_general(_rows(weights), values, (((3,), (2,)), ((0, 1), (0, 1))))
    return jnp.swapaxes(heads.reshape(*lead, -1), 1, 2).reshape(query.shape)


def _rows(array: jax.Array) -> jax.Array:
    """View (B, G, N, R, X) as (B, G, N R, X)."""
    return array.reshape(*array.shape[:2], -1, array.shape[-1])
