"""The encoders, of texts and of images: hidden states, a vector, and logits by a head.

Driven by an `EncoderConfig` or an `ImageEncoderConfig`; layers are scanned; parameters are a plain
nested dict of float32 arrays, products are in the stack's dtype. Knows no devices.

Parameters (L layers, D model, H heads, K head dim, F feed-forward, V vocabulary, Y token types or
classes, P positions, S patch side, C channels; norms have `scale` and `bias`):
  encoder/positions (P, D) · encoder/{embedding_norm, final_norm}, as the config has them
  encoder/layers/{attention_norm, attention/{qkv (L, D, 3, H, K), out (L, H, K, D)},
    mlp_norm, mlp/{wi (L, D, 1, F), wo (L, F, D)}}, biases beside their kernels
  pooler/{kernel (D, D), bias (D)}
  of texts: embedding (V, D) · token_types (Y, D)
    head/{kernel (D, D), bias (D), norm, vocabulary_bias (V)}
  of images: patches/{kernel (S, S, C, D), bias (D)} · class_token (D)
    classifier/{kernel (D, Y), bias (Y)}
Further dims in this file: B batch, T tokens, or patches and one; X image side, N patches.
Source: Dosovitskiy et al., An Image is Worth 16x16 Words, section 3.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from redco_flow.engine.random import example_keys
from redco_flow.models.attention.bias import Biases, row_biases
from redco_flow.models.config import EncoderConfig, ImageEncoderConfig
from redco_flow.models.families.family_config import ModelConfig
from redco_flow.models.family import ModelFamily, Params
from redco_flow.models.projections import product, wide_product
from redco_flow.models.transformer.blocks import Linear, Norm, activate, normal, zeros
from redco_flow.models.transformer.stack import Stack


class MaskedHead(nn.Module):
    """The masked language model's head; its last kernel is the embedding."""

    config: EncoderConfig

    def setup(self) -> None:
        """Declare the parameters."""
        c = self.config.stack
        self.kernel = self.param("kernel", normal(c.init_stddev), (c.width, c.width))
        self.bias = self.param("bias", zeros, (c.width,))
        self.norm = Norm(c.norm, c.width)
        self.vocabulary_bias = self.param("vocabulary_bias", zeros, (self.config.vocab_size,))

    def __call__(self, hidden: jax.Array, embedding: jax.Array) -> jax.Array:
        """Map (B, T, D) to (B, T, V), float32."""
        assert self.config.head_activation is not None
        dtype = hidden.dtype
        inner = product(hidden, self.kernel.astype(dtype)) + self.bias.astype(dtype)
        hidden = self.norm(activate(inner[..., None, :], self.config.head_activation))
        return wide_product(hidden, embedding.astype(dtype).T) + self.vocabulary_bias


class Patches(nn.Module):
    """The patch embedding: images to the sequence that the layers read."""

    config: ImageEncoderConfig

    def setup(self) -> None:
        """Declare the parameters."""
        c, side = self.config, self.config.patch_size
        shape = (side, side, c.num_channels, c.stack.width)
        self.kernel = self.param("kernel", normal(c.stack.init_stddev), shape)
        self.bias = self.param("bias", zeros, (c.stack.width,))

    def __call__(self, images: jax.Array) -> jax.Array:
        """Map (B, X, X, C) to (B, N, D), row by row of patches."""
        c, dtype = self.config, self.config.stack.dtype
        side, num = c.patch_size, c.image_size // c.patch_size
        cut = images.reshape(-1, num, side, num, side, c.num_channels)
        patches = cut.swapaxes(2, 3).reshape(-1, num * num, side, side, c.num_channels)
        return product(patches.astype(dtype), self.kernel.astype(dtype), 3) + self.bias.astype(
            dtype
        )


class Encoder(nn.Module):
    """The whole model, of texts or of images; the functions of `EncoderFamily` call it."""

    config: EncoderConfig | ImageEncoderConfig

    def setup(self) -> None:
        """Declare the parameters."""
        c, width = self.config, self.config.stack.width
        init = normal(c.stack.init_stddev)
        if isinstance(c, ImageEncoderConfig):
            self.patches = Patches(c)
            self.class_token = self.param("class_token", init, (width,))
            if c.num_classes:
                self.classifier = Linear(width, c.num_classes, c.stack.init_stddev)
        else:
            self.embedding = self.param("embedding", init, (c.vocab_size, width))
            self.token_types = self.param("token_types", init, (c.num_token_types, width))
            if c.head_activation is not None:
                self.head = MaskedHead(c)
        self.encoder = Stack(c.stack)
        if c.has_pooler:
            self.pooler = Linear(width, width, c.stack.init_stddev)

    def __call__(self, *inputs: Any) -> jax.Array:
        """Return the head's logits, float32: `encode`'s inputs to `scores`."""
        return self.scores(self.encode(*inputs))

    def encode(
        self,
        inputs: jax.Array,
        token_type_ids: jax.Array | None,
        biases: Biases,
        keys: jax.Array | None,
    ) -> jax.Array:
        """Return (B, T, D), of images the class token first.

        Raises:
            ValueError: images of another shape than the model's.
        """
        c = self.config
        if isinstance(c, ImageEncoderConfig):
            embedded = self._embed_images(inputs)
            positions = jnp.arange(embedded.shape[1])
        else:
            embedded = self._embed_tokens(inputs, token_type_ids)
            positions = _positions(c, inputs)
        encoded: jax.Array = self.encoder(embedded, positions, biases, keys)
        return encoded

    def scores(self, encoded: jax.Array) -> jax.Array:
        """Map (B, T, D) to logits, float32: (B, T, V) of masked tokens, or (B, Y) of classes."""
        c = self.config
        if not c.has_scores:
            head = "classifier" if isinstance(c, ImageEncoderConfig) else "head for masked tokens"
            raise ValueError(f"this model was published without a {head}: it encodes only.")
        logits: jax.Array
        if isinstance(c, ImageEncoderConfig):
            logits = self.classifier.wide(encoded[:, 0])
        else:
            logits = self.head(encoded, self.embedding)
        return logits

    def pool(self, *inputs: Any) -> jax.Array:
        """Return the pooler's result for the first token, (B, D)."""
        encoded = self.encode(*inputs)
        if not self.config.has_pooler:
            is_image = isinstance(self.config, ImageEncoderConfig)
            vector = "first token" if is_image else "mean over a text's tokens"
            raise ValueError(
                f"this model was published without a pooler: take the {vector} of what it encodes."
            )
        return jnp.tanh(self.pooler(encoded[:, 0]))

    def declare(self) -> None:
        """Use every parameter that there is."""
        c = self.config
        if isinstance(c, ImageEncoderConfig):
            inputs = jnp.zeros((1, c.image_size, c.image_size, c.num_channels))
        else:
            inputs = jnp.zeros((1, 1), jnp.int32)
        encoded = self.encode(inputs, None, (), None)
        if c.has_scores:
            self.scores(encoded)
        if c.has_pooler:
            self.pooler(encoded[:, 0])

    def _embed_tokens(self, input_ids: jax.Array, token_type_ids: jax.Array | None) -> jax.Array:
        """Look tokens up, (B, T) to (B, T, D); ids outside a table read its nearest end."""
        types = jnp.zeros_like(input_ids) if token_type_ids is None else token_type_ids
        embedded = self.embedding.at[input_ids].get(mode="clip")
        embedded = embedded + self.token_types.at[types].get(mode="clip")
        return embedded.astype(self.config.stack.dtype)

    def _embed_images(self, images: jax.Array) -> jax.Array:
        """Map (B, X, X, C) to the class token and patches, (B, T, D)."""
        c = self.config
        assert isinstance(c, ImageEncoderConfig)
        expected = (c.image_size, c.image_size, c.num_channels)
        if images.shape[1:] != expected:
            raise ValueError(
                f"images are {images.shape[1:]}; the model reads {expected}: rows, columns, "
                "channels."
            )
        patches = self.patches(images)
        first = jnp.broadcast_to(self.class_token.astype(patches.dtype), patches[:, :1].shape)
        return jnp.concatenate([first, patches], axis=1)


def _positions(config: EncoderConfig, input_ids: jax.Array) -> jax.Array:
    """Return each token's position, (T) or (B, T); padding is before the first."""
    if config.padding_token is None:
        return jnp.arange(input_ids.shape[1])
    is_token = (input_ids != config.padding_token).astype(jnp.int32)
    return jnp.cumsum(is_token, axis=1) * is_token - 1


@dataclass(frozen=True)
class EncoderFamily(ModelFamily[ModelConfig]):
    """A family of encoders, of texts or of images."""

    module = Encoder

    def apply(
        self,
        config: ModelConfig,
        params: Params,
        input_ids: jax.Array,
        attention_mask: jax.Array | None = None,
        token_type_ids: jax.Array | None = None,
        rngs: jax.Array | None = None,
    ) -> jax.Array:
        """Return the head's float32 logits: (B, T, V) of each place, or (B, Y) of an image.

        Args:
            input_ids: (B, T), some of them the tokenizer's mask token. Of images in place of ids
                (B, X, X, C), normalised as the model's were, for which transformers has channels
                first and the two arguments that follow are None.
            attention_mask: (B, T); 0 is padding, on either side. None: there is none.
            token_type_ids: (B, T); which of two texts a token belongs to. None: all to the first.
            rngs: (B,) keys, one per example, for dropout; None: no dropout.

        Raises:
            ValueError: the model has no head (`config.has_head`, `config.has_classifier`), or the
                images another shape.
        """
        return self._read(
            "__call__", config, params, input_ids, attention_mask, token_type_ids, rngs
        )

    def encode(
        self,
        config: ModelConfig,
        params: Params,
        input_ids: jax.Array,
        attention_mask: jax.Array | None = None,
        token_type_ids: jax.Array | None = None,
        rngs: jax.Array | None = None,
    ) -> jax.Array:
        """Return the last hidden states (B, T, D) in `config.dtype`; see `apply`.

        Their mean over the tokens that are not padding is one vector per text.
        """
        return self._read("encode", config, params, input_ids, attention_mask, token_type_ids, rngs)

    def pool(
        self,
        config: ModelConfig,
        params: Params,
        input_ids: jax.Array,
        attention_mask: jax.Array | None = None,
        token_type_ids: jax.Array | None = None,
        rngs: jax.Array | None = None,
    ) -> jax.Array:
        """Return the pooler's result for the first place (B, D), in `config.dtype`; see `apply`.

        Transformers calls it `pooler_output`.

        Raises:
            ValueError: the model has no pooler (`config.has_pooler`).
        """
        return self._read("pool", config, params, input_ids, attention_mask, token_type_ids, rngs)

    def _read(
        self,
        method: str,
        config: ModelConfig,
        params: Params,
        input_ids: jax.Array,
        attention_mask: jax.Array | None,
        token_type_ids: jax.Array | None,
        rngs: jax.Array | None,
    ) -> jax.Array:
        biases = row_biases(attention_mask, None)
        keys = example_keys(rngs, input_ids.shape[0])
        found: jax.Array = self._run(
            config, params, input_ids, token_type_ids, biases, keys, method=method
        )
        return found
