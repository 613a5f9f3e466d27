"""T5 as one Flax module: embedding, encoder, decoder and head; over whole texts, or token by token.

Dims in this file: L layers, D model, H heads, K head dim, V vocabulary, B batch, S source,
T target or new tokens, N beams.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from redco_flow.models.attention import attention_mask_bias
from redco_flow.models.blockwise_bias import Biases
from redco_flow.models.key_value_cache import (
    SourceCache,
    no_writers,
    with_room,
    with_writers,
    written,
)
from redco_flow.models.layers_apart import call_layer, laid_like, run_layers, step_layers
from redco_flow.models.product import wide_product
from redco_flow.models.t5_config import T5Config
from redco_flow.models.t5_layers import DecoderLayer, StepShared, normal
from redco_flow.models.t5_stack import T5Stack
from redco_flow.models.visibility import padding_bias

Params = dict[str, Any]

# Which derived key this is among those that an example's key gives.
_SOURCE_IN, _SOURCE_OUT, _SOURCE_LAYERS, _TARGET_IN, _TARGET_OUT, _TARGET_LAYERS = range(6)


class T5(nn.Module):
    """The whole model; the functions of `t5.py` are its public face."""

    config: T5Config

    def setup(self) -> None:
        """Declare the parameters."""
        c = self.config
        self.embedding = self.param("embedding", normal(c), (c.vocab_size, c.d_model))
        self.encoder = T5Stack(c, is_decoder=False)
        self.decoder = T5Stack(c, is_decoder=True)
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
    ) -> SourceCache:
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
        return SourceCache(source, writers, laid_like(layers, empty))

    def step(
        self, layers: Any, cache: SourceCache, tokens: jax.Array, position: jax.Array
    ) -> tuple[jax.Array, SourceCache]:
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
