"""A diffusion transformer: patches of a noised image in, their velocity out, by time and caption.

DiT (Peebles and Xie 2023) with adaLN-Zero: time and caption scale, shift and gate every layer.
Dims in this file: B batch, S side of an image, C channels, P patches, W words, D width.
"""

from __future__ import annotations

import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from redco_flow.recipes.text_to_image.config import Settings

# As large as what layers add, so that words and positions are distinguishable from the first step.
_INIT = nn.initializers.normal(1.0)
_ZEROS = nn.initializers.zeros
# Times run from 0 to 1, and sinusoids are of numbers up to a thousand or so.
_TIME_SCALE = 1000.0


def draw_params(key: jax.Array, settings: Settings) -> Any:
    """Draw the parameters of `DiffusionTransformer`."""
    image = jnp.zeros((1, *settings.image_shape))
    words = jnp.ones((1, settings.max_words, 2), jnp.int32)
    arguments = (image, jnp.zeros(1), words, jnp.ones(1, bool))
    return DiffusionTransformer(settings).init(key, *arguments)["params"]


class DiffusionTransformer(nn.Module):
    """The whole network; `encode` and `denoise` are its parts."""

    settings: Settings

    def setup(self) -> None:
        """Declare the parts."""
        s = self.settings
        self.captions = CaptionEncoder(s)
        self.no_caption = self.param("no_caption", _INIT, (s.width,))
        self.time_mlp = Mlp(s.width, s.width, nn.silu)
        num_patches = (s.image_size // s.patch_size) ** 2
        self.positions = self.param("positions", _INIT, (num_patches, s.width))
        self.patches = nn.Dense(s.width)
        self.layers = [Layer(s) for _ in range(s.num_layers)]
        self.last_modulation = nn.DenseGeneral((2, s.width), kernel_init=_ZEROS)
        self.pixels = nn.Dense(s.patch_size**2 * s.num_channels, kernel_init=_ZEROS)

    def __call__(
        self, noised: jax.Array, time: jax.Array, words: jax.Array, is_conditioned: jax.Array
    ) -> jax.Array:
        """Return the velocity (B, S, S, C) of images at times (B,).

        Args:
            words: (B, W, 2), as `collate_fn` makes them.
            is_conditioned: (B,), whether the network gets the caption.
        """
        return self.denoise(noised, time, self.encode(words, is_conditioned))

    def encode(self, words: jax.Array, is_conditioned: jax.Array) -> jax.Array:
        """Return a vector (B, D) of each caption, or that of none."""
        return jnp.where(is_conditioned[:, None], self.captions(words), self.no_caption)

    def denoise(self, noised: jax.Array, time: jax.Array, caption: jax.Array) -> jax.Array:
        """Return the velocity (B, S, S, C), given the captions' vectors (B, D)."""
        s = self.settings
        told = nn.silu(caption + self.time_mlp(sinusoids(time * _TIME_SCALE, s.width)))
        x = self.patches(to_patches(noised, s.patch_size)) + self.positions
        for layer in self.layers:
            x = layer(x, told)
        shift, scale = jnp.unstack(self.last_modulation(told)[:, :, None], axis=1)
        return to_image(self.pixels(modulate(x, shift, scale)), s)


class CaptionEncoder(nn.Module):
    """Words (B, W, 2) to one vector (B, D): one transformer layer, and the mean over words."""

    settings: Settings

    @nn.compact
    def __call__(self, words: jax.Array) -> jax.Array:
        """Encode captions; what is no word is not attended to."""
        s = self.settings
        table = self.param("table", _INIT, (s.num_word_rows, s.width))
        positions = self.param("positions", _INIT, (s.max_words, s.width))
        is_word = words[..., 0] > 0
        x = table[words].sum(axis=2) + positions
        mask = nn.make_attention_mask(jnp.ones_like(is_word), is_word)
        x = x + nn.MultiHeadDotProductAttention(s.num_heads)(nn.LayerNorm()(x), mask=mask)
        x = x + Mlp(2 * s.width, s.width, nn.gelu)(nn.LayerNorm()(x))
        summed = jnp.sum(x * is_word[..., None], axis=1)
        num_words = jnp.maximum(is_word.sum(axis=1, keepdims=True), 1)
        return nn.Dense(s.width)(nn.LayerNorm()(summed / num_words))


class Layer(nn.Module):
    """Attention over patches and a feed-forward block, modulated by the condition (B, D)."""

    settings: Settings

    @nn.compact
    def __call__(self, x: jax.Array, told: jax.Array) -> jax.Array:
        """Return (B, P, D)."""
        s = self.settings
        modulation = nn.DenseGeneral((6, s.width), kernel_init=_ZEROS, name="modulation")(told)
        shift, scale, gate, *others = jnp.unstack(modulation[:, :, None], axis=1)
        attended = nn.MultiHeadDotProductAttention(s.num_heads)(modulate(x, shift, scale))
        x = x + gate * attended
        shift, scale, gate = others
        return x + gate * Mlp(4 * s.width, s.width, nn.gelu)(modulate(x, shift, scale))


class Mlp(nn.Module):
    """Two products with an activation between."""

    hidden: int
    width: int
    activation: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Return (…, width)."""
        return nn.Dense(self.width)(self.activation(nn.Dense(self.hidden)(x)))


def modulate(x: jax.Array, shift: jax.Array, scale: jax.Array) -> jax.Array:
    """Normalise (B, P, D), then scale and shift by (B, 1, D)."""
    return jax.nn.standardize(x, epsilon=1e-6) * (1 + scale) + shift


def sinusoids(numbers: jax.Array, width: int) -> jax.Array:
    """Return cosines and sines (B, D) of numbers (B,), of periods from 2π to 2π · 10 000."""
    rates = jnp.exp(-math.log(10_000) * jnp.arange(width // 2) / (width // 2))
    phases = numbers[:, None] * rates
    return jnp.concatenate([jnp.cos(phases), jnp.sin(phases)], axis=-1)


def to_patches(image: jax.Array, size: int) -> jax.Array:
    """Cut (B, S, S, C) into patches (B, P, size · size · C), row by row."""
    b, side, _, channels = image.shape
    grid = image.reshape(b, side // size, size, side // size, size, channels)
    return grid.transpose(0, 1, 3, 2, 4, 5).reshape(b, -1, size * size * channels)


def to_image(patches: jax.Array, settings: Settings) -> jax.Array:
    """Undo `to_patches`."""
    side, size = settings.image_size // settings.patch_size, settings.patch_size
    grid = patches.reshape(-1, side, side, size, size, settings.num_channels)
    return grid.transpose(0, 1, 3, 2, 4, 5).reshape(-1, *settings.image_shape)
