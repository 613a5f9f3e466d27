"""T5 in Flax: encoder, decoder, cached decoding; the public face of the family.

v1.0 (relu, tied and scaled head) and v1.1/Flan (gated gelu, a head of its own). Layers are
scanned, so every layer parameter has a leading layer dim; parameters are a plain nested dict of
float32 arrays, products are in `config.dtype`. Knows no devices: shard the parameters and the
compiler spreads the rest. Refuses to know files, tokenizers and losses.

Parameters (L layers, D model, H heads, K head dim, F feed-forward, G 1 or 2 gates, V vocabulary):
  embedding (V, D) · lm_head (D, V), untied models only
  {encoder,decoder}/relative_bias (buckets, H) · {encoder,decoder}/final_norm (D)
  {encoder,decoder}/layers/self_attention/{norm (L, D), qkv (L, D, 3, H, K), out (L, H, K, D)}
  decoder/layers/cross_attention/{norm (L, D), q (L, D, H, K), kv (L, D, 2, H, K), out}
  {encoder,decoder}/layers/feed_forward/{norm (L, D), wi (L, D, G, F), wo (L, F, D)}
Further dims in this file: B batch, S source, T target or new tokens, N beams.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from redco_flow.models.attention import MASKED, attention_mask_bias, causal_bias, rms_norm
from redco_flow.models.blockwise_bias import Bias, Biases, ByDistance
from redco_flow.models.context_axis import num_context_shards
from redco_flow.models.dropout import dropout, example_keys, fold_keys
from redco_flow.models.key_value_cache import no_writers, with_room, with_writers, written
from redco_flow.models.layers_apart import (
    call_layer,
    laid_like,
    run_layers,
    step_layers,
    with_faster_layers,
    without_layers,
)
from redco_flow.models.product import wide_product
from redco_flow.models.relative_position import distance_bias, pairwise_bias
from redco_flow.models.t5_config import T5Config
from redco_flow.models.t5_layers import (
    DecoderLayer,
    EncoderLayer,
    StepShared,
    constant,
    normal,
)
from redco_flow.models.t5_tensors import IGNORED_TENSORS, config_of_tensors, tensor_layouts
from redco_flow.models.visibility import padding_bias

__all__ = [
    "IGNORED_TENSORS",
    "Cache",
    "Config",
    "abstract_params",
    "apply",
    "config_of_tensors",
    "decode_step",
    "decoding_params",
    "encode",
    "init_cache",
    "init_params",
    "tensor_layouts",
]

Config = T5Config
Params = dict[str, Any]

# Which derived key this is among those that an example's key gives.
_SOURCE_IN, _SOURCE_OUT, _SOURCE_LAYERS, _TARGET_IN, _TARGET_OUT, _TARGET_LAYERS = range(6)


class Cache(NamedTuple):
    """What decoding one more token needs.

    Attributes:
        source: per source, the same for all its beams and all steps: every cross-attention's
            keys and values, (L, B, H, S, K) each, what hides the source's padding, the relative
            biases.
        beams: which beam wrote each token of a hypothesis, (B, N, T): reordered.
        heads: keys and values of all beams' tokens so far, (L, B, H, T N, K) each; they grow.

    Each layer's keys and values stand apart where its parameters do.
    """

    source: dict[str, Any]
    beams: jax.Array
    heads: Any


class _Stack(nn.Module):
    """What encoder and decoder share: scanned layers, a relative bias and a last norm."""

    config: T5Config
    is_decoder: bool

    def setup(self) -> None:
        c = self.config
        layer_type: Any = DecoderLayer if self.is_decoder else EncoderLayer
        if c.remat:
            layer_type = nn.remat(layer_type, prevent_cse=False)
        self.layers = nn.scan(
            layer_type,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=(0, nn.broadcast),
        )(c)
        shape = (c.relative_attention_num_buckets, c.num_heads)
        self.relative_bias = self.param("relative_bias", normal(c, c.d_model), shape)
        self.final_norm = self.param("final_norm", constant(c), (c.d_model,))

    @property
    def _layer_indices(self) -> jax.Array:
        c = self.config
        return jnp.arange(c.num_decoder_layers if self.is_decoder else c.num_layers)

    def position_bias(self, length: int) -> Bias:
        """Return what positions add and hide, (1, H, T, T) or told by blocks."""
        kind: dict[str, Any] = {
            "bidirectional": not self.is_decoder,
            "max_distance": self.config.relative_attention_max_distance,
        }
        if num_context_shards() > 1:
            values = distance_bias(self.relative_bias, np.arange(1 - length, length), **kind)
            return ByDistance(values, length, is_causal=self.is_decoder)
        bias = pairwise_bias(self.relative_bias, length, length, **kind)
        return bias + causal_bias(length) if self.is_decoder else bias

    def cached_position_bias(self, max_length: int) -> jax.Array:
        """Return (H, 2 T - 1): the keys' bias at step t is its slice of T from T - 1 - t."""
        bias = distance_bias(
            self.relative_bias,
            np.arange(-(max_length - 1), 1),
            bidirectional=False,
            max_distance=self.config.relative_attention_max_distance,
        )
        return jnp.pad(bias, ((0, 0), (0, max_length - 1)), constant_values=MASKED)

    def __call__(
        self, hidden: jax.Array, shared: tuple[Any, ...], keys: jax.Array | None, sites: range
    ) -> jax.Array:
        """Run all layers; `sites` are the derived keys for input, output and layers."""
        rate = self.config.dropout_rate
        hidden = dropout(hidden, rate, keys, sites[0])
        layer_keys = fold_keys(keys, sites[2])
        hidden, _ = self.layers(hidden, self._layer_indices, (*shared, layer_keys))
        return dropout(self.finish(hidden), rate, keys, sites[1])

    def finish(self, hidden: jax.Array) -> jax.Array:
        """Apply the last norm."""
        normed: jax.Array = rms_norm(hidden, self.final_norm, self.config.layer_norm_epsilon)
        return normed


class T5(nn.Module):
    """The whole model; the functions below are its public face."""

    config: T5Config

    def setup(self) -> None:
        """Declare the parameters."""
        c = self.config
        self.embedding = self.param("embedding", normal(c), (c.vocab_size, c.d_model))
        self.encoder = _Stack(c, is_decoder=False)
        self.decoder = _Stack(c, is_decoder=True)
        if not c.tie_word_embeddings:
            shape = (c.d_model, c.vocab_size)
            # transformers starts the untied head at deviation 1, which T5X and we do not: the
            # first losses would be in the hundreds.
            self.lm_head = self.param("lm_head", normal(c, c.d_model), shape)

    def embed(self, ids: jax.Array) -> jax.Array:
        """Look tokens up, (…) to (…, D); ids outside the vocabulary read its nearest end."""
        return self.embedding.at[ids].get(mode="clip").astype(self.config.dtype)

    def encode(
        self, input_ids: jax.Array, attention_mask: jax.Array, keys: jax.Array | None
    ) -> jax.Array:
        """Return (B, S, D)."""
        position_bias = self.encoder.position_bias(input_ids.shape[1])
        biases = (position_bias, padding_bias(attention_mask))
        sites = range(_SOURCE_IN, _SOURCE_LAYERS + 1)
        return self.encoder(self.embed(input_ids), (biases,), keys, sites)

    def decode(
        self,
        encoded: jax.Array,
        attention_mask: jax.Array,
        decoder_input_ids: jax.Array,
        decoder_attention_mask: jax.Array | None,
        keys: jax.Array | None,
    ) -> jax.Array:
        """Return logits (B, T, V), float32."""
        length = decoder_input_ids.shape[1]
        biases: Biases = (self.decoder.position_bias(length),)
        if decoder_attention_mask is not None:
            biases = (*biases, padding_bias(decoder_attention_mask))
        sites = range(_TARGET_IN, _TARGET_LAYERS + 1)
        shared = (biases, encoded, padding_bias(attention_mask))
        return self.logits(self.decoder(self.embed(decoder_input_ids), shared, keys, sites))

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Score the vocabulary: (B, T, D) to (B, T, V), float32."""
        c = self.config
        if c.scale_decoder_outputs:
            hidden = hidden * c.d_model**-0.5
        if c.tie_word_embeddings:
            return wide_product(hidden, self.embedding.astype(hidden.dtype).T)
        return wide_product(hidden, self.lm_head.astype(hidden.dtype))

    def __call__(
        self,
        input_ids: jax.Array,
        attention_mask: jax.Array,
        decoder_input_ids: jax.Array,
        decoder_attention_mask: jax.Array | None,
        keys: jax.Array | None,
    ) -> jax.Array:
        """Return logits (B, T, V), float32."""
        encoded = self.encode(input_ids, attention_mask, keys)
        return self.decode(encoded, attention_mask, decoder_input_ids, decoder_attention_mask, keys)

    def start(
        self,
        layers: Any,
        encoded: jax.Array,
        attention_mask: jax.Array,
        num_beams: int,
        max_length: int,
    ) -> Cache:
        """Return the cache before the first token."""
        c, batch_size = self.config, len(encoded)
        layer = DecoderLayer(c, parent=None)

        def run_layer(params: Params, carry: None, own: None) -> Any:
            heads = call_layer(layer, params, encoded, method="source_heads")
            return carry, with_room(heads, 0)

        _, heads = run_layers(run_layer, layers, None, laid_like(layers, None))
        source = {
            "heads": heads,
            "mask_bias": padding_bias(attention_mask),
            "position_bias": self.decoder.cached_position_bias(max_length),
        }
        size = (c.num_decoder_layers, batch_size, c.num_heads, num_beams * max_length, c.d_kv)
        empty = (jnp.zeros(size, encoded.dtype), jnp.zeros(size, encoded.dtype))
        writers = no_writers(batch_size, num_beams, max_length)
        return Cache(source, writers, laid_like(layers, empty))

    def step(
        self, layers: Any, cache: Cache, tokens: jax.Array, position: jax.Array
    ) -> tuple[jax.Array, Cache]:
        """Return logits (B, N, V), float32, and the cache with one position more."""
        source, writers = cache.source, with_writers(cache.beams, position)
        num_beams, max_length = writers.shape[1:]
        by_distance = jax.lax.dynamic_slice_in_dim(
            source["position_bias"], max_length - 1 - position, max_length, axis=1
        )
        biases = (
            jnp.repeat(by_distance, num_beams, axis=1)[None, :, None],
            attention_mask_bias(written(writers, position))[:, None],
        )
        shared = StepShared(position * num_beams, biases, source["mask_bias"])
        layer, hidden = DecoderLayer(self.config, parent=None), self.embed(tokens)
        hidden, heads = step_layers(layer, layers, hidden, cache.heads, source["heads"], shared)
        logits = self.logits(self.decoder.finish(hidden))
        return logits, cache._replace(beams=writers, heads=heads)


def decoding_params(config: T5Config, params: Params) -> Params:
    """Return parameters from which `init_cache` and `decode_step` give the same, faster.

    The decoder's layers are laid out once for all steps, as the platform at hand reads them best.
    """
    del config  # the face's interface
    return with_faster_layers(params, "decoder")


def _run(config: T5Config, params: Params, *inputs: Any, method: str = "__call__") -> Any:
    """Call one of the module's methods on `params`."""
    return T5(config).apply({"params": params}, *inputs, method=method)


def _run_with_layers(config: T5Config, params: Params, *inputs: Any, method: str) -> Any:
    """Call a method that is given the decoder layers' parameters, stacked or apart."""
    rest, layers = without_layers(params, "decoder")
    return _run(config, rest, layers, *inputs, method=method)


@partial(jax.jit, static_argnums=0)
def init_params(config: T5Config, key: jax.Array) -> Params:
    """Draw float32 parameters; deviations are transformers', but for an untied head's."""
    tokens = jnp.zeros((1, 1), jnp.int32)
    params: Params = T5(config).init(key, tokens, tokens, tokens, None, None)["params"]
    return params


def abstract_params(config: T5Config) -> Params:
    """Return the parameters' shapes and dtypes as `jax.ShapeDtypeStruct`s, allocating nothing."""
    shapes: Params = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    return shapes


def apply(
    config: T5Config,
    params: Params,
    input_ids: jax.Array,
    attention_mask: jax.Array,
    decoder_input_ids: jax.Array,
    decoder_attention_mask: jax.Array | None = None,
    rngs: jax.Array | None = None,
) -> jax.Array:
    """Return float32 logits (B, T, V) of every next target token.

    Args:
        input_ids, attention_mask: (B, S); mask 0 is padding, on either side.
        decoder_input_ids: (B, T), shifted right: begins with `decoder_start_token_id`.
        decoder_attention_mask: (B, T); not needed for padding at the end, which no token sees.
        rngs: (B,) keys, one per example, for dropout; None: no dropout.
    """
    keys = example_keys(rngs, input_ids.shape[0])
    logits: jax.Array = _run(
        config,
        params,
        input_ids,
        attention_mask,
        decoder_input_ids,
        decoder_attention_mask,
        keys,
    )
    return logits


def encode(
    config: T5Config,
    params: Params,
    input_ids: jax.Array,
    attention_mask: jax.Array,
    rngs: jax.Array | None = None,
) -> jax.Array:
    """Return the encoder's output (B, S, D) in `config.dtype`."""
    keys = example_keys(rngs, input_ids.shape[0])
    encoded: jax.Array = _run(config, params, input_ids, attention_mask, keys, method="encode")
    return encoded


def init_cache(
    config: T5Config,
    params: Params,
    encoded: jax.Array,
    attention_mask: jax.Array,
    *,
    num_beams: int,
    max_length: int,
) -> Cache:
    """Return the cache before the first token; cross-attention's keys and values are made here.

    Args:
        encoded: (B, S, D), `encode`'s result.
        max_length: how many tokens will be decoded at most.
    """
    inputs = (encoded, attention_mask, num_beams, max_length)
    cache: Cache = _run_with_layers(config, params, *inputs, method="start")
    return cache


def decode_step(
    config: T5Config, params: Params, cache: Cache, tokens: jax.Array, position: jax.Array
) -> tuple[jax.Array, Cache]:
    """Return float32 logits (B, N, V) of the token after `tokens` (B, N), and the new cache.

    Args:
        position: of `tokens`, from 0, where they are `decoder_start_token_id`.
    """
    inputs = (cache, tokens, position)
    result: tuple[jax.Array, Cache] = _run_with_layers(config, params, *inputs, method="step")
    return result
