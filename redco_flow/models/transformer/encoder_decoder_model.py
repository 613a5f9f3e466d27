"""The one encoder-decoder of two stacks, one embedding and a head; with cached decoding.

What it encodes are texts, or images (`encoder_model.py`).

Driven by an `EncoderDecoderConfig`; layers are scanned; parameters are a plain nested dict of
float32 arrays, products are in the stacks' dtype. Knows no devices.

Parameters (L layers, D model, H heads, K head dim, F feed-forward, W 1 or 2 gates, V vocabulary,
P positions; norms have `scale`, layer norms `bias` too):
  embedding (V, D) · lm_head (D, V), untied models only · final_logits_bias (1, V), not trained
  of images, whose encoder is of width E: projection/{kernel (E, D), bias (D)} where E is not D
  {encoder,decoder}/{positions (P, D), relative_bias (buckets, H), embedding_norm, final_norm}
  {encoder,decoder}/layers/{attention_norm, attention/{qkv (L, D, 3, H, K), out (L, H, K, D)},
    mlp_norm, mlp/{wi (L, D, W, F), wo (L, F, D)}}, biases beside their kernels
  decoder/layers/{cross_attention_norm, cross_attention/{q (L, D, H, K), kv (L, D, 2, H, K), out}}
Further dims in this file: B batch, S source, T target or new tokens, N beams, G key-value groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from redco_flow.engine.random import example_keys, fold_keys
from redco_flow.models.attention.bias import as_arrays, row_biases
from redco_flow.models.attention.cache import (
    SourceCache,
    StepShared,
    no_writers,
    with_writers,
    written,
)
from redco_flow.models.config import EncoderDecoderConfig, StackConfig
from redco_flow.models.families.family_config import ModelConfig
from redco_flow.models.family import Params
from redco_flow.models.numerics import scaled
from redco_flow.models.transformer.blocks import Linear, normal, zeros
from redco_flow.models.transformer.decoding_layers import (
    cast_for_products,
    unstack_where_faster,
    without_layers,
)
from redco_flow.models.transformer.encoder_model import Encoder
from redco_flow.models.transformer.language_model import (
    Head,
    LanguageModel,
    LanguageModelFamily,
    Unscored,
)
from redco_flow.models.transformer.stack import Stack

# Which derived key this is among those that an example's key gives.
_SOURCE, _TARGET = range(2)


class EncoderDecoder(LanguageModel):
    """The whole model; the functions of `EncoderDecoderFamily` call it."""

    config: EncoderDecoderConfig

    def setup(self) -> None:
        """Declare the parameters."""
        c = self.config
        width = c.decoder.width
        init = normal(c.embedding_stddev)
        self.embedding = self.param("embedding", init, (c.vocab_size, width))
        self.decoder = Stack(c.decoder)
        if isinstance(c.encoder, StackConfig):
            self.encoder: Any = Stack(c.encoder)
        else:
            self.encoder = Encoder(c.encoder)
        if c.encoder.width != width:
            self.projection = Linear(c.encoder.width, width, c.embedding_stddev)
        if not c.tie_word_embeddings:
            # transformers starts T5's untied head at stddev 1, which T5X and we do not: the
            # first losses would be in the hundreds.
            init = normal(c.decoder.stddev(width))
            self.lm_head = self.param("lm_head", init, (width, c.vocab_size))
        if c.has_logits_bias:
            self.final_logits_bias = self.param("final_logits_bias", zeros, (1, c.vocab_size))

    def embed(self, ids: jax.Array) -> jax.Array:
        """Look tokens up, (…) to (…, D)."""
        return self.look_up(ids, self.config.decoder.dtype)

    def before_head(self, hidden: jax.Array) -> Unscored:
        """Bring the decoder's result (B, T, D) to what the head takes."""
        c = self.config
        if c.head_scale != 1.0:
            hidden = scaled(hidden, c.head_scale)
        kernel = self.embedding.T if c.tie_word_embeddings else self.lm_head
        bias = None
        if c.has_logits_bias:
            # A constant of published models, no weight of theirs.
            bias = jax.lax.stop_gradient(self.final_logits_bias)
        return Unscored(hidden, Head(kernel.astype(hidden.dtype), bias))

    def encode(
        self, input_ids: jax.Array, attention_mask: jax.Array, keys: jax.Array | None
    ) -> jax.Array:
        """Return (B, S, D)."""
        c, keys = self.config, fold_keys(keys, _SOURCE)
        encoded: jax.Array
        if isinstance(c.encoder, StackConfig):
            positions = jnp.arange(input_ids.shape[1])
            biases = row_biases(attention_mask, None)
            encoded = self.encoder(self.embed(input_ids), positions, biases, keys)
        else:
            encoded = self.encoder.encode(input_ids, None, (), keys)
        return encoded if c.encoder.width == c.decoder.width else self.projection(encoded)

    def declare(self) -> None:
        """Use every parameter that there is."""
        c, tokens = self.config.encoder, jnp.zeros((1, 1), jnp.int32)
        source, mask = tokens, jnp.ones_like(tokens)
        if not isinstance(c, StackConfig):
            source = jnp.zeros((1, c.image_size, c.image_size, c.num_channels))
            mask = jnp.ones((1, c.num_patches + 1), jnp.int32)
        self.unscored(source, mask, tokens, None, None)

    def unscored(
        self,
        input_ids: jax.Array,
        attention_mask: jax.Array,
        decoder_input_ids: jax.Array,
        decoder_attention_mask: jax.Array | None,
        keys: jax.Array | None,
    ) -> Unscored:
        """Compute all but the logits."""
        (encoded_bias,) = row_biases(attention_mask, None)
        hidden = self.decoder(
            self.embed(decoder_input_ids),
            jnp.arange(decoder_input_ids.shape[1]),
            row_biases(decoder_attention_mask, None),
            fold_keys(keys, _TARGET),
            self.encode(input_ids, attention_mask, keys),
            encoded_bias,
        )
        return self.before_head(hidden)

    def start(
        self,
        layers: Any,
        encoded: jax.Array,
        attention_mask: jax.Array,
        num_beams: int,
        max_length: int,
        room: int,
    ) -> SourceCache:
        """Return the cache before the first token."""
        self.decoder.check_length(max_length)
        (encoded_bias,) = as_arrays(row_biases(attention_mask, None))
        size = (len(encoded), num_beams * room)
        return SourceCache(
            source={
                "heads": self.decoder.source_heads(layers, encoded),
                "bias": encoded_bias,
                "bias_by_step": self.decoder.bias_by_step(max_length),
            },
            beams=no_writers(len(encoded), num_beams, room),
            heads=self.decoder.no_heads(layers, *size, encoded.dtype),
        )

    def step(
        self, layers: Any, cache: SourceCache, tokens: jax.Array, step: jax.Array
    ) -> tuple[jax.Array, SourceCache]:
        """Return logits (B, N, V), float32, and the cache with one position more."""
        source, writers = cache.source, with_writers(cache.beams, step)
        shared = StepShared(
            slot=step * tokens.shape[1],
            is_visible=written(writers, step),
            encoded_bias=source["bias"],
            biases=_step_biases(source["bias_by_step"], writers, step),
        )
        inputs = (self.embed(tokens), cache.heads, source["heads"], shared, step)
        hidden, heads = self.decoder.step(layers, *inputs)
        return self.logits(hidden), cache._replace(beams=writers, heads=heads)


def _step_biases(
    by_step: jax.Array | None, writers: jax.Array, step: jax.Array
) -> tuple[jax.Array, ...]:
    """Return what positions add at this step, (1, H, 1, M), where they add something."""
    if by_step is None:
        return ()
    num_beams, room = writers.shape[1:]
    max_length = (by_step.shape[1] + 1) // 2
    here = jax.lax.dynamic_slice_in_dim(by_step, max_length - 1 - step, room, axis=1)
    return (jnp.repeat(here, num_beams, axis=1)[None, :, None],)


@dataclass(frozen=True)
class EncoderDecoderFamily(LanguageModelFamily[ModelConfig]):
    """A family of encoder-decoders."""

    module = EncoderDecoder

    def apply_before_head(
        self,
        config: ModelConfig,
        params: Params,
        input_ids: jax.Array,
        attention_mask: jax.Array,
        decoder_input_ids: jax.Array,
        decoder_attention_mask: jax.Array | None = None,
        rngs: jax.Array | None = None,
    ) -> Unscored:
        """Return the hidden states and the head, from which `score` computes the logits.

        Args:
            input_ids, attention_mask: (B, S); mask 0 is padding, on either side. Of images
                (B, X, X, C) in place of ids, and a mask of ones, for patches and one.
            decoder_input_ids: (B, T), shifted right: begins with `decoder_start_token_id`.
            decoder_attention_mask: (B, T); not needed for padding at the end, which no token sees.
            rngs: (B,) keys, one per example, for dropout; None: no dropout.

        Raises:
            ValueError: sequences longer than the model's positions reach.
        """
        keys = example_keys(rngs, input_ids.shape[0])
        inputs = (input_ids, attention_mask, decoder_input_ids, decoder_attention_mask, keys)
        result: Unscored = self._run(config, params, *inputs, method="unscored")
        return result

    def encode(
        self,
        config: ModelConfig,
        params: Params,
        input_ids: jax.Array,
        attention_mask: jax.Array,
        rngs: jax.Array | None = None,
    ) -> jax.Array:
        """Return the encoder's output (B, S, D) in `config.dtype`."""
        keys = example_keys(rngs, input_ids.shape[0])
        inputs = (input_ids, attention_mask, keys)
        encoded: jax.Array = self._run(config, params, *inputs, method="encode")
        return encoded

    def decoding_params(self, config: ModelConfig, params: Params) -> Params:
        """Return parameters from which `init_cache` and `decode_step` give the same, faster.

        The decoder's kernels, the embedding and the head are cast to the products' dtype, and the
        decoder's layers unstacked where that is faster, once for all steps.
        """
        every_step = {name: part for name, part in params.items() if name != "encoder"}
        cast = cast_for_products(every_step, config.core.decoder.dtype)
        decoder = cast["decoder"]
        layers = unstack_where_faster(decoder["layers"])
        return {**params, **cast, "decoder": {**decoder, "layers": layers}}

    def init_cache(
        self,
        config: ModelConfig,
        params: Params,
        encoded: jax.Array,
        attention_mask: jax.Array,
        *,
        num_beams: int,
        max_length: int,
        room: int | None = None,
    ) -> SourceCache:
        """Return the cache before the first token; cross-attention's keys and values are made here.

        Args:
            encoded: (B, S, D), `encode`'s result.
            max_length: how many tokens will be decoded at most.
            room: for how many of them there is room at first, before `grow_cache`; None: for all.

        Raises:
            ValueError: more tokens than the model's positions reach.
        """
        room = max_length if room is None else room
        inputs = (encoded, attention_mask, num_beams, max_length, room)
        cache: SourceCache = self._run_with_layers(config, params, *inputs, method="start")
        return cache

    def _without_layers(self, params: Params) -> tuple[Params, Any]:
        decoder, layers = without_layers(params["decoder"])
        return {**params, "decoder": decoder}, layers
