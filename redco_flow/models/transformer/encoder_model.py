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
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from redco_flow.models.attention.bias import Biases, row_biases
from redco_flow.models.config import EncoderConfig, ImageEncoderConfig
from redco_flow.models.families.family_config import FamilyConfig, ModelConfig
from redco_flow.models.family import ModelFamily, Params
from redco_flow.models.projections import product, wide_product
from redco_flow.models.random import example_keys
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


class _EncoderWithHeads(nn.Module):
    """An encoder, whose `encode` maps inputs to (B, T, D) and `scores` these to logits."""

    config: Any

    def __call__(self, *inputs: Any) -> jax.Array:
        """Return the head's logits, float32."""
        encoded = self.encode(*inputs)
        logits: jax.Array = self.scores(encoded)
        return logits

    def pool(self, *inputs: Any) -> jax.Array:
        """Return what the pooler makes of the first token, (B, D)."""
        encoded = self.encode(*inputs)
        if not self.config.has_pooler:
            raise ValueError(
                f"this model was published without a pooler: take the {self.vector} of what it "
                "encodes."
            )
        return jnp.tanh(self.pooler(encoded[:, 0]))

    def declare_heads(self, encoded: jax.Array, *, has_scores: bool) -> None:
        """Use every parameter of the heads."""
        if has_scores:
            self.scores(encoded)
        if self.config.has_pooler:
            self.pooler(encoded[:, 0])


class Encoder(_EncoderWithHeads):
    """The whole model of texts; the functions of `EncoderFamily` call it."""

    config: EncoderConfig
    vector: ClassVar[str] = "mean over a text's tokens"

    def setup(self) -> None:
        """Declare the parameters."""
        c, width = self.config, self.config.stack.width
        init = normal(c.stack.init_stddev)
        self.embedding = self.param("embedding", init, (c.vocab_size, width))
        self.token_types = self.param("token_types", init, (c.num_token_types, width))
        self.encoder = Stack(c.stack)
        if c.head_activation is not None:
            self.head = MaskedHead(c)
        if c.has_pooler:
            self.pooler = Linear(width, width, c.stack.init_stddev)

    def encode(
        self,
        input_ids: jax.Array,
        token_type_ids: jax.Array,
        biases: Biases,
        keys: jax.Array | None,
    ) -> jax.Array:
        """Return (B, T, D); ids outside a table read its nearest end."""
        embedded = self.embedding.at[input_ids].get(mode="clip")
        embedded = embedded + self.token_types.at[token_type_ids].get(mode="clip")
        positions = _positions(self.config, input_ids)
        encoded: jax.Array = self.encoder(
            embedded.astype(self.config.stack.dtype), positions, biases, keys
        )
        return encoded

    def scores(self, encoded: jax.Array) -> jax.Array:
        """Map (B, T, D) to logits (B, T, V), float32."""
        if self.config.head_activation is None:
            raise ValueError(
                "this model was published without a head for masked tokens: it encodes only."
            )
        logits: jax.Array = self.head(encoded, self.embedding)
        return logits

    def declare(self) -> None:
        """Use every parameter that there is."""
        tokens = jnp.zeros((1, 1), jnp.int32)
        encoded = self.encode(tokens, tokens, (), None)
        self.declare_heads(encoded, has_scores=self.config.head_activation is not None)


def _positions(config: EncoderConfig, input_ids: jax.Array) -> jax.Array:
    """Return each token's position, (T) or (B, T); padding is before the first."""
    if config.padding_token is None:
        return jnp.arange(input_ids.shape[1])
    is_token = (input_ids != config.padding_token).astype(jnp.int32)
    return jnp.cumsum(is_token, axis=1) * is_token - 1


@dataclass(frozen=True)
class EncoderFamily(ModelFamily[FamilyConfig]):
    """A family of encoders of texts."""

    module = Encoder

    def apply(
        self,
        config: FamilyConfig,
        params: Params,
        input_ids: jax.Array,
        attention_mask: jax.Array | None = None,
        token_type_ids: jax.Array | None = None,
        rngs: jax.Array | None = None,
    ) -> jax.Array:
        """Return float32 logits (B, T, V) of what stands at every place.

        Args:
            input_ids: (B, T); some of them the tokenizer's mask token.
            attention_mask: (B, T); 0 is padding, on either side. None: there is none.
            token_type_ids: (B, T); which of two texts a token belongs to. None: all to the first.
            rngs: (B,) keys, one per example, for dropout; None: no dropout.

        Raises:
            ValueError: the model has no head (`config.has_head`).
        """
        inputs = (input_ids, attention_mask, token_type_ids, rngs)
        return self._read(config, params, *inputs, method="__call__")

    def encode(
        self,
        config: FamilyConfig,
        params: Params,
        input_ids: jax.Array,
        attention_mask: jax.Array | None = None,
        token_type_ids: jax.Array | None = None,
        rngs: jax.Array | None = None,
    ) -> jax.Array:
        """Return the last layer's hidden states (B, T, D) in `config.dtype`; see `apply`.

        Their mean over the tokens that are not padding is one vector per text.
        """
        inputs = (input_ids, attention_mask, token_type_ids, rngs)
        return self._read(config, params, *inputs, method="encode")

    def pool(
        self,
        config: FamilyConfig,
        params: Params,
        input_ids: jax.Array,
        attention_mask: jax.Array | None = None,
        token_type_ids: jax.Array | None = None,
        rngs: jax.Array | None = None,
    ) -> jax.Array:
        """Return what the pooler makes of each text's first place (B, D), in `config.dtype`.

        Transformers calls it `pooler_output`; see `apply`.

        Raises:
            ValueError: the model has no pooler (`config.has_pooler`).
        """
        inputs = (input_ids, attention_mask, token_type_ids, rngs)
        return self._read(config, params, *inputs, method="pool")

    def _read(
        self,
        config: FamilyConfig,
        params: Params,
        input_ids: jax.Array,
        attention_mask: jax.Array | None,
        token_type_ids: jax.Array | None,
        rngs: jax.Array | None,
        *,
        method: str,
    ) -> jax.Array:
        if token_type_ids is None:
            token_type_ids = jnp.zeros_like(input_ids)
        keys = example_keys(rngs, input_ids.shape[0])
        biases = row_biases(attention_mask, None)
        inputs = (input_ids, token_type_ids, biases, keys)
        found: jax.Array = self._run(config, params, *inputs, method=method)
        return found


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


class ImageEncoder(_EncoderWithHeads):
    """The whole model of images; the functions of `ImageEncoderFamily` call it."""

    config: ImageEncoderConfig
    vector: ClassVar[str] = "first token"

    def setup(self) -> None:
        """Declare the parameters."""
        c = self.config
        self.patches = Patches(c)
        self.class_token = self.param("class_token", normal(c.stack.init_stddev), (c.stack.width,))
        self.encoder = Stack(c.stack)
        if c.num_classes:
            self.classifier = Linear(c.width, c.num_classes, c.stack.init_stddev)
        if c.has_pooler:
            self.pooler = Linear(c.width, c.width, c.stack.init_stddev)

    def encode(self, images: jax.Array, keys: jax.Array | None) -> jax.Array:
        """Return (B, T, D), the class token first.

        Raises:
            ValueError: images of another shape than the model's.
        """
        _check_shape(self.config, images.shape)
        patches = self.patches(images)
        first = jnp.broadcast_to(self.class_token.astype(patches.dtype), patches[:, :1].shape)
        tokens = jnp.concatenate([first, patches], axis=1)
        encoded: jax.Array = self.encoder(tokens, jnp.arange(tokens.shape[1]), (), keys)
        return encoded

    def scores(self, encoded: jax.Array) -> jax.Array:
        """Map (B, T, D) to the classes' logits (B, Y), float32."""
        if not self.config.num_classes:
            raise ValueError("this model was published without a classifier: it encodes only.")
        logits: jax.Array = self.classifier.wide(encoded[:, 0])
        return logits

    def declare(self) -> None:
        """Use every parameter that there is."""
        c = self.config
        images = jnp.zeros((1, c.image_size, c.image_size, c.num_channels))
        encoded = self.encode(images, None)
        self.declare_heads(encoded, has_scores=bool(c.num_classes))


def _check_shape(config: ImageEncoderConfig, shape: tuple[int, ...]) -> None:
    expected = (config.image_size, config.image_size, config.num_channels)
    if shape[1:] != expected:
        raise ValueError(
            f"images are {shape[1:]}; the model reads {expected}: rows, columns, channels."
        )


@dataclass(frozen=True)
class ImageEncoderFamily(ModelFamily[ModelConfig]):
    """A family of encoders of images."""

    module = ImageEncoder

    def apply(
        self, config: ModelConfig, params: Params, images: jax.Array, rngs: jax.Array | None = None
    ) -> jax.Array:
        """Return float32 logits (B, Y) of the classes.

        Args:
            images: (B, X, X, C), normalised as the model's were; transformers has channels first.
            rngs: (B,) keys, one per example, for dropout; None: no dropout.

        Raises:
            ValueError: the model has no classifier, or the images another shape.
        """
        return self._read(config, params, images, rngs, method="__call__")

    def encode(
        self, config: ModelConfig, params: Params, images: jax.Array, rngs: jax.Array | None = None
    ) -> jax.Array:
        """Return the final norm's hidden states (B, T, D) in `config.dtype`; see `apply`."""
        return self._read(config, params, images, rngs, method="encode")

    def pool(
        self, config: ModelConfig, params: Params, images: jax.Array, rngs: jax.Array | None = None
    ) -> jax.Array:
        """Return what the pooler makes of each image's first token (B, D); see `apply`.

        Raises:
            ValueError: the model has no pooler (`config.has_pooler`).
        """
        return self._read(config, params, images, rngs, method="pool")

    def _read(
        self,
        config: ModelConfig,
        params: Params,
        images: jax.Array,
        rngs: jax.Array | None,
        *,
        method: str,
    ) -> jax.Array:
        inputs = (images, example_keys(rngs, images.shape[0]))
        found: jax.Array = self._run(config, params, *inputs, method=method)
        return found
