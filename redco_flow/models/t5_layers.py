"""T5's layers as Flax modules: the parameters of one layer and what it computes.

Every module brings its own norm and returns what is to be added to its input.
Dims in this file: B batch, S source, T target, N beams, M places in the cache, D model, H heads,
K head dim, F feed-forward, G gates.
Source: Raffel et al. 2020; Shazeer 2020 for the gates; checked against transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from redco_flow.models import random_bits
from redco_flow.models.activation import activate
from redco_flow.models.attention import attend, rms_norm
from redco_flow.models.block_config import AttentionConfig
from redco_flow.models.blockwise_bias import Bias, Biases, as_arrays
from redco_flow.models.cached_attention import attend_cached
from redco_flow.models.context_axis import num_context_shards, split_sequence
from redco_flow.models.dropout import dropout, fold_keys
from redco_flow.models.key_value_cache import append
from redco_flow.models.layer_inputs import KeysValues
from redco_flow.models.product import product
from redco_flow.models.ring_attention import ring_attend
from redco_flow.models.t5_config import T5Config

Initializer = Callable[..., jax.Array]


class StepShared(NamedTuple):
    """What all layers of the decoder share while decoding a token.

    Attributes:
        place: of the first beam's token in the cache.
        biases: what positions add and what beams may not see; each broadcasts to (B, H, N, M).
        encoded_bias: what hides the source's padding, (B, 1, 1, S).
    """

    place: jax.Array
    biases: tuple[jax.Array, ...]
    encoded_bias: jax.Array


# Which dropout this is among those that share a layer's keys.
_SELF_WEIGHTS, _SELF_OUT, _CROSS_WEIGHTS, _CROSS_OUT, _FF_INNER, _FF_OUT = range(6)


def normal(config: T5Config, variance_divisor: float = 1.0) -> Initializer:
    """Return an initializer of standard deviation factor / sqrt(variance_divisor)."""
    deviation = config.initializer_factor * variance_divisor**-0.5

    def initialize(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        return random_bits.normal(_raw(key), shape) * np.float32(deviation)

    return initialize


def constant(config: T5Config) -> Initializer:
    """Return the initializer of a norm's scale."""
    return nn.initializers.constant(config.initializer_factor)


def _qkv_init(config: T5Config) -> Initializer:
    """Queries start smaller by sqrt(head dim), which stands for the scores' missing scale."""

    def initialize(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        kernel = normal(config, config.d_model)(key, shape)
        return kernel.at[:, 0].multiply(config.d_kv**-0.5)

    return initialize


def _raw(key: jax.Array) -> jax.Array:
    is_typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(key) if is_typed else key


def _attend(
    config: T5Config,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    biases: Biases,
    keys: jax.Array | None,
    site: int,
) -> jax.Array:
    """Attend without scaling, (B, Q, H, K), wherever the sequences lie."""
    rate = config.dropout_rate
    options: dict[str, Any] = {"dropout_keys": keys, "dropout_site": site}
    if num_context_shards() == 1:
        return attend(query, key, value, as_arrays(biases), dropout_rate=rate, **options)
    return ring_attend(_plain_attention(config), query, key, value, biases, **options)


def _plain_attention(config: T5Config) -> AttentionConfig:
    """Return what attention is beside its biases: it has no scale."""
    heads = (config.num_heads, config.num_heads, config.d_kv)
    return AttentionConfig(*heads, scale=1.0, is_causal=False, dropout=config.dropout_rate)


class SelfAttention(nn.Module):
    """Attention of a sequence over itself, with the norm before it."""

    config: T5Config

    def setup(self) -> None:
        """Declare the parameters."""
        c = self.config
        heads, width = (c.num_heads, c.d_kv), c.d_model
        self.norm = self.param("norm", constant(c), (width,))
        self.qkv = self.param("qkv", _qkv_init(c), (width, 3, *heads))
        self.out = self.param("out", normal(c, c.num_heads * c.d_kv), (*heads, width))

    def project(self, hidden: jax.Array) -> jax.Array:
        """Return queries, keys and values, stacked: (B, T, 3, H, K)."""
        normed = rms_norm(hidden, self.norm, self.config.layer_norm_epsilon)
        return product(normed, self.qkv.astype(hidden.dtype))

    def merge(self, heads: jax.Array) -> jax.Array:
        """Bring (B, T, H, K) back to the model's width."""
        return product(heads, self.out.astype(heads.dtype), 2)

    def __call__(self, hidden: jax.Array, biases: Biases, keys: jax.Array | None) -> jax.Array:
        """Return what is added to `hidden`."""
        query, key, value = jnp.unstack(self.project(hidden), axis=2)
        heads = _attend(self.config, query, key, value, biases, keys, _SELF_WEIGHTS)
        return dropout(self.merge(heads), self.config.dropout_rate, keys, _SELF_OUT)


class CrossAttention(nn.Module):
    """Attention of the target over the encoded source, with the norm before it."""

    config: T5Config

    def setup(self) -> None:
        """Declare the parameters."""
        c = self.config
        heads, width = (c.num_heads, c.d_kv), c.d_model
        self.norm = self.param("norm", constant(c), (width,))
        self.q = self.param("q", normal(c, c.d_model * c.d_kv), (width, *heads))
        self.kv = self.param("kv", normal(c, c.d_model), (width, 2, *heads))
        self.out = self.param("out", normal(c, c.num_heads * c.d_kv), (*heads, width))

    def queries(self, hidden: jax.Array) -> jax.Array:
        """Return queries (B, T, H, K)."""
        normed = rms_norm(hidden, self.norm, self.config.layer_norm_epsilon)
        return product(normed, self.q.astype(hidden.dtype))

    def merge(self, heads: jax.Array) -> jax.Array:
        """Bring (B, T, H, K) back to the model's width."""
        return product(heads, self.out.astype(heads.dtype), 2)

    def keys_values(self, encoded: jax.Array) -> KeysValues:
        """Return the source's keys and values, (B, S, H, K) each."""
        both = product(encoded, self.kv.astype(encoded.dtype))
        key, value = jnp.unstack(both, axis=2)
        return key, value

    def __call__(
        self,
        hidden: jax.Array,
        keys_values: tuple[jax.Array, jax.Array],
        mask_bias: Bias,
        keys: jax.Array | None,
    ) -> jax.Array:
        """Return what is added to `hidden`."""
        query = self.queries(hidden)
        heads = _attend(self.config, query, *keys_values, (mask_bias,), keys, _CROSS_WEIGHTS)
        return dropout(self.merge(heads), self.config.dropout_rate, keys, _CROSS_OUT)


class FeedForward(nn.Module):
    """The position-wise layer, gated or not, with the norm before it."""

    config: T5Config

    def setup(self) -> None:
        """Declare the parameters."""
        c = self.config
        gates = 2 if c.is_gated else 1
        self.norm = self.param("norm", constant(c), (c.d_model,))
        self.wi = self.param("wi", normal(c, c.d_model), (c.d_model, gates, c.d_ff))
        self.wo = self.param("wo", normal(c, c.d_ff), (c.d_ff, c.d_model))

    def __call__(self, hidden: jax.Array, keys: jax.Array | None) -> jax.Array:
        """Return what is added to `hidden`."""
        c = self.config
        normed = rms_norm(hidden, self.norm, c.layer_norm_epsilon)
        projected = product(normed, self.wi.astype(hidden.dtype))
        inner = activate(projected, c.activation)
        inner = dropout(inner, c.dropout_rate, keys, _FF_INNER)
        outer = product(inner, self.wo.astype(hidden.dtype))
        return dropout(outer, c.dropout_rate, keys, _FF_OUT)


class EncoderLayer(nn.Module):
    """One scanned layer of the encoder."""

    config: T5Config

    def setup(self) -> None:
        """Declare the parts."""
        self.self_attention = SelfAttention(self.config)
        self.feed_forward = FeedForward(self.config)

    def __call__(
        self, hidden: jax.Array, layer: jax.Array, shared: tuple[Any, ...]
    ) -> tuple[jax.Array, None]:
        """Map (B, S, D) to (B, S, D); `shared` is (self-attention's biases, dropout keys)."""
        biases, keys = shared
        keys = fold_keys(keys, layer)
        hidden = split_sequence(hidden)
        hidden = hidden + self.self_attention(hidden, biases, keys)
        return split_sequence(hidden + self.feed_forward(hidden, keys)), None


class DecoderLayer(nn.Module):
    """One scanned layer of the decoder: over whole targets, or over one token with a cache."""

    config: T5Config

    def setup(self) -> None:
        """Declare the parts."""
        self.self_attention = SelfAttention(self.config)
        self.cross_attention = CrossAttention(self.config)
        self.feed_forward = FeedForward(self.config)

    def __call__(
        self,
        hidden: jax.Array,
        layer: jax.Array,
        shared: tuple[Any, ...],
    ) -> tuple[jax.Array, None]:
        """Map (B, T, D) to (B, T, D).

        `shared` is (self-attention's biases, encoded, its mask's bias, dropout keys).
        """
        biases, encoded, mask_bias, keys = shared
        keys = fold_keys(keys, layer)
        hidden = split_sequence(hidden)
        hidden = hidden + self.self_attention(hidden, biases, keys)
        source = self.cross_attention.keys_values(encoded)
        hidden = hidden + self.cross_attention(hidden, source, mask_bias, keys)
        return split_sequence(hidden + self.feed_forward(hidden, keys)), None

    def source_heads(self, encoded: jax.Array) -> KeysValues:
        """Return this layer's keys and values of the source (B, S, H, K), kept while decoding."""
        return self.cross_attention.keys_values(encoded)

    def step(
        self,
        hidden: jax.Array,
        cache: KeysValues,
        number: jax.Array | None,
        source: KeysValues,
        shared: StepShared,
    ) -> tuple[jax.Array, KeysValues]:
        """Map one token of each beam, (B, N, D), and add its key and value to the cache.

        Beams stand where positions stand elsewhere: to cross-attention, norms and feed-forward
        they are the same.

        Args:
            cache: (B, H, M, K) each; several layers' where `number` says which this one is.
            source: its keys and values, (B, H, S, K) each.
        """
        query, key, value = jnp.unstack(self.self_attention.project(hidden), axis=2)
        cache, kept = append(cache, (key, value), number, shared.place)
        plain = _plain_attention(self.config)
        gathered = attend_cached(plain, query, kept, shared.biases)
        hidden = hidden + self.self_attention.merge(gathered)
        query = self.cross_attention.queries(hidden)
        gathered = attend_cached(plain, query, source, (shared.encoded_bias,))
        hidden = hidden + self.cross_attention.merge(gathered)
        return hidden + self.feed_forward(hidden, None), cache
