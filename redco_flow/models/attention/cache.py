"""The key-value cache of decoding: a prompt's keys and values, then those of every beam's tokens.

All beams of a row write into one cache, where token t of beam n is at slot S + t N + n and is not
moved: which beam wrote each token of a hypothesis is stored separately, and reordering beams
reorders nothing else. A cache may begin with room for the first tokens and grow by blocks of slots,
which are separate arrays: a token reads the existing blocks, and adding one copies none.
Dims in this file: L layers, B batch, S prompt or source, N beams, T new tokens,
M all slots (S + T N), G key-value groups, K head dim.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from redco_flow.models.attention.bias import Bias, Biases
from redco_flow.models.attention.context import SequenceOrder
from redco_flow.models.attention.grouped import cap, split_bias, split_groups
from redco_flow.models.attention.rotary import Rotation
from redco_flow.models.layer_config import AttentionConfig
from redco_flow.models.numerics import scaled, softmax, softmax_with_sinks, wide_einsum

KeysValues = tuple[jax.Array, jax.Array]
CacheT = TypeVar("CacheT", bound=Any)


class BlockedHeads(NamedTuple):
    """Keys and values of all slots, block after block.

    Attributes:
        blocks: (B, G, M, K) each, with a leading L where layers are stacked; the Ms add up to all
            slots, and tokens are written into the last block.
    """

    blocks: tuple[KeysValues, ...]


class WholeShared(NamedTuple):
    """The inputs that all layers share over whole sequences.

    Attributes:
        biases: what rows hide and positions add, each broadcasting to (B, H, T, T).
        rotations: rotary angles of the tokens, in each way that layers have.
        keys: raw dropout keys (B, 2).
        encoded: another sequence (B, S, D), for cross-attention.
        encoded_bias: what hides its padding, (B, 1, 1, S).
        order: of the tokens in memory; biases are given in the text's.
    """

    biases: Biases
    rotations: tuple[Rotation, ...]
    keys: jax.Array | None
    encoded: jax.Array | None = None
    encoded_bias: Bias | None = None
    order: SequenceOrder = SequenceOrder()


class StepShared(NamedTuple):
    """The inputs that all layers share while decoding a token.

    Attributes:
        slot: of the first beam's token in the cache.
        is_visible: (B, N, M) whether a slot may be attended to.
        back: (B, M) its distance from the token in positions; needed for windows only.
        rotations: the token's rotary angles, in each way that layers have.
        encoded_bias: what hides another sequence's padding, (B, 1, 1, S).
        biases: what positions add, each broadcasting to (B, H, N, M).
    """

    slot: jax.Array
    is_visible: jax.Array
    back: jax.Array | None = None
    rotations: tuple[Rotation, ...] = ()
    encoded_bias: jax.Array | None = None
    biases: tuple[jax.Array, ...] = ()


class StepLayer(NamedTuple):
    """The inputs that differ between layers while decoding a token.

    Attributes:
        window: how many tokens back it looks, where layers differ.
        rotary: which of the rotations it has, where they differ.
        source: keys and values (B, G, S, K) of another sequence.
    """

    window: jax.Array | None = None
    rotary: jax.Array | None = None
    source: BlockedHeads | None = None


class SourceCache(NamedTuple):
    """The state from which an encoder-decoder decodes one more token.

    Attributes:
        source: per source, the same for all its beams and all steps: every cross-attention's
            keys and values, (L, B, G, S, K) each, and the biases that each token meets.
        beams: which beam wrote each token of a hypothesis, (B, N, T): reordered.
        heads: keys and values of all beams' tokens so far, (L, B, G, T N, K) each.

    Keys and values are `BlockedHeads`, or a tuple of layers' if the parameters are unstacked.
    """

    source: dict[str, Any]
    beams: jax.Array
    heads: Any


def with_room(heads: KeysValues, num_places: int) -> BlockedHeads:
    """Bring keys and values (B, S, G, K) to (B, G, S, K), followed by `num_places` empty slots."""
    key, value = (
        jnp.pad(jnp.swapaxes(each, 1, 2), ((0, 0), (0, 0), (0, num_places), (0, 0)))
        for each in heads
    )
    return BlockedHeads(((key, value),))


def with_room_for(cache: CacheT, num_tokens: int) -> CacheT:
    """Return a cache with a block more if it has room for fewer new tokens than that.

    Args:
        cache: a named tuple whose `beams` are writers (B, N, T), and whose `heads` are
            `BlockedHeads`, or several of them.
    """
    _, num_beams, room = cache.beams.shape
    num_added = num_tokens - room
    if num_added <= 0:
        return cache

    def add_block(heads: BlockedHeads) -> BlockedHeads:
        *shape, _, head_dim = heads.blocks[-1][0].shape
        empty = jnp.zeros((*shape, num_added * num_beams, head_dim), heads.blocks[-1][0].dtype)
        return BlockedHeads((*heads.blocks, (empty, empty)))

    heads = jax.tree.map(add_block, cache.heads, is_leaf=lambda x: isinstance(x, BlockedHeads))
    writers = jnp.pad(cache.beams, ((0, 0), (0, 0), (0, num_added)))
    grown: CacheT = cache._replace(beams=writers, heads=heads)
    return grown


def append(
    cache: BlockedHeads, heads: KeysValues, layer: jax.Array | None, slot: jax.Array
) -> tuple[BlockedHeads, BlockedHeads]:
    """Write a token's keys and values (B, N, G, K) in place; return the cache and the layer's part.

    Args:
        cache: (L, B, G, M, K) each; without L where `layer` is None.
        slot: in the last block, counted over all blocks.
    """
    *full, last = cache.blocks
    slot = slot - sum(key.shape[-2] for key, _ in full)
    place = () if layer is None else (layer,)
    key, value = (_write(*pair, place, slot) for pair in zip(last, heads, strict=True))
    cache = BlockedHeads((*full, (key, value)))
    return cache, cache if layer is None else _of_layer(cache, layer)


def _of_layer(cache: BlockedHeads, layer: jax.Array) -> BlockedHeads:
    def index(stacked: jax.Array) -> jax.Array:
        one: jax.Array = jax.lax.dynamic_index_in_dim(stacked, layer, axis=0, keepdims=False)
        return one

    found: BlockedHeads = jax.tree.map(index, cache)
    return found


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
    """Return (1, T N): each slot's distance in positions from this step's token."""
    _, num_beams, max_length = writers.shape
    return step - jnp.repeat(jnp.arange(max_length), num_beams)[None]


def attend_cached(
    config: AttentionConfig,
    query: jax.Array,
    kept: BlockedHeads,
    biases: tuple[jax.Array, ...],
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Attend with (B, N, H, K) over blocks of keys and values (B, G, M, K), softmax in float32.

    Args:
        biases: float32, added to the scores; each broadcasts to (B, H, N, M).
        sinks: see `attend_grouped`.

    Returns:
        (B, N, H, K).
    """
    num_groups = kept.blocks[0][0].shape[1]
    # Beams and a group's heads are the rows of one product, which is how compilers do it fastest.
    rows = jnp.swapaxes(split_groups(scaled(query, config.scale), num_groups), 1, 2)
    lead = rows.shape[:-1]
    scores = jnp.concatenate(
        [wide_einsum("bgqk,bgmk->bgqm", _rows(rows), keys) for keys, _ in kept.blocks], axis=-1
    )
    scores = cap(scores, config.cap).reshape(*lead, -1)
    for bias in biases:
        scores = scores + jnp.swapaxes(split_bias(bias, num_groups), 2, 3)
    if sinks is None:
        weights = softmax(scores).astype(query.dtype)
    else:
        by_group = sinks.reshape(num_groups, 1, -1, 1)
        weights = softmax_with_sinks(scores, by_group).astype(query.dtype)
    heads = _weighted(_rows(weights), [values for _, values in kept.blocks])
    return jnp.swapaxes(heads.reshape(*lead, -1), 1, 2).reshape(query.shape)


def _weighted(weights: jax.Array, blocks: list[jax.Array]) -> jax.Array:
    """Weigh values (B, G, M, K) by (B, G, Q, all M): (B, G, Q, K), blocks added in float32."""
    dtype = weights.dtype if len(blocks) == 1 else jnp.float32
    ends = np.cumsum([values.shape[2] for values in blocks])[:-1].tolist()
    parts = [
        jax.lax.dot_general(
            part, values, (((3,), (2,)), ((0, 1), (0, 1))), preferred_element_type=dtype
        )
        for part, values in zip(jnp.split(weights, ends, axis=-1), blocks, strict=True)
    ]
    return sum(parts[1:], start=parts[0]).astype(weights.dtype)


def _rows(array: jax.Array) -> jax.Array:
    """View (B, G, N, R, X) as (B, G, N R, X)."""
    return array.reshape(*array.shape[:2], -1, array.shape[-1])
