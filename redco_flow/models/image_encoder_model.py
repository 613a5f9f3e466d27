"""The one encoder of images: hidden states of their patches, a vector, or the scores of classes.

Driven by an `ImageEncoderConfig`; layers are scanned; parameters are a plain nested dict of float32
arrays, products are in the stack's dtype. Knows no devices.

Parameters (L layers, D model, H heads, K head dim, F feed-forward, Y classes, S patch side,
C channels, T patches and one; norms have `scale` and `bias`):
  patches/{kernel (S, S, C, D), bias (D)} · class_token (D) · encoder/{positions (T, D), final_norm}
  encoder/layers/{attention_norm, attention/{qkv (L, D, 3, H, K), out (L, H, K, D)},
    mlp_norm, mlp/{wi (L, D, 1, F), wo (L, F, D)}}, biases beside their kernels
  classifier/{kernel (D, Y), bias (Y)} · pooler/{kernel (D, D), bias (D)}
Further dims in this file: B batch, X image side, N patches.
Source: Dosovitskiy et al., An Image is Worth 16x16 Words, section 3.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from redco_flow.models.blocks import normal, zeros
from redco_flow.models.config import ImageEncoderConfig
from redco_flow.models.encoder_model import Pooler
from redco_flow.models.families.family_config import ModelConfig
from redco_flow.models.family import ModelFamily, Params
from redco_flow.models.projections import product, wide_product
from redco_flow.models.random import example_keys
from redco_flow.models.stack import Stack


class Patches(nn.Module):
    """What turns an image's patches into the sequence that the layers read."""

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


class Classifier(nn.Module):
    """What scores the classes of the first token."""

    config: ImageEncoderConfig

    def setup(self) -> None:
        """Declare the parameters."""
        c, shape = self.config.stack, (self.config.stack.width, self.config.num_classes)
        self.kernel = self.param("kernel", normal(c.init_stddev), shape)
        self.bias = self.param("bias", zeros, shape[1:])

    def __call__(self, hidden: jax.Array) -> jax.Array:
        """Map (B, T, D) to (B, Y), float32."""
        first = hidden[:, 0]
        return wide_product(first, self.kernel.astype(first.dtype)) + self.bias


class ImageEncoder(nn.Module):
    """The whole model; the functions of `ImageEncoderFamily` call it."""

    config: ImageEncoderConfig

    def setup(self) -> None:
        """Declare the parameters."""
        c = self.config
        self.patches = Patches(c)
        self.class_token = self.param("class_token", normal(c.stack.init_stddev), (c.stack.width,))
        self.encoder = Stack(c.stack)
        if c.num_classes:
            self.classifier = Classifier(c)
        if c.has_pooler:
            self.pooler = Pooler(c.stack)

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

    def __call__(self, images: jax.Array, keys: jax.Array | None) -> jax.Array:
        """Return the classes' logits (B, Y), float32."""
        encoded = self.encode(images, keys)
        if not self.config.num_classes:
            raise ValueError("this model was published without a classifier: it encodes only.")
        logits: jax.Array = self.classifier(encoded)
        return logits

    def pool(self, images: jax.Array, keys: jax.Array | None) -> jax.Array:
        """Return the images' vectors (B, D)."""
        encoded = self.encode(images, keys)
        if not self.config.has_pooler:
            raise ValueError(
                "this model was published without a pooler: take the first of what it encodes."
            )
        pooled: jax.Array = self.pooler(encoded)
        return pooled

    def declare(self) -> None:
        """Use every parameter that there is."""
        c = self.config
        images = jnp.zeros((1, c.image_size, c.image_size, c.num_channels))
        encoded = self.encode(images, None)
        if self.config.num_classes:
            self.classifier(encoded)
        if self.config.has_pooler:
            self.pooler(encoded)


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
        return _run(config, params, images, rngs, method="__call__")

    def encode(
        self, config: ModelConfig, params: Params, images: jax.Array, rngs: jax.Array | None = None
    ) -> jax.Array:
        """Return the final norm's hidden states (B, T, D) in `config.dtype`; see `apply`."""
        return _run(config, params, images, rngs, method="encode")

    def pool(
        self, config: ModelConfig, params: Params, images: jax.Array, rngs: jax.Array | None = None
    ) -> jax.Array:
        """Return what the pooler makes of each image's first token (B, D); see `apply`.

        Raises:
            ValueError: the model has no pooler (`config.has_pooler`).
        """
        return _run(config, params, images, rngs, method="pool")


def _run(
    config: ModelConfig,
    params: Params,
    images: jax.Array,
    rngs: jax.Array | None,
    *,
    method: str,
) -> jax.Array:
    keys = example_keys(rngs, images.shape[0])
    result: Any = ImageEncoder(config.core).apply({"params": params}, images, keys, method=method)
    found: jax.Array = result
    return found
