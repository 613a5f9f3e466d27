"""Diffusion in continuous time: the loss of the velocity, and DDIM with classifier-free guidance.

At time t an image x is signal(t) x + noise(t) e, with e drawn from a normal distribution; the
network predicts the velocity signal(t) e - noise(t) x (Salimans and Ho 2022).
Dims in this file: B batch, S side of an image, C channels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

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
        self.time_mlp = DenoiserMlp(s.width, s.width, nn.silu)
        num_patches = (s.image_size // s.patch_size) ** 2
        self.positions = self.param("positions", _INIT, (num_patches, s.width))
        self.patches = nn.Dense(s.width)
        self.layers = [DenoiserLayer(s) for _ in range(s.num_layers)]
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
        x = x + DenoiserMlp(2 * s.width, s.width, nn.gelu)(nn.LayerNorm()(x))
        summed = jnp.sum(x * is_word[..., None], axis=1)
        num_words = jnp.maximum(is_word.sum(axis=1, keepdims=True), 1)
        return nn.Dense(s.width)(nn.LayerNorm()(summed / num_words))


class DenoiserLayer(nn.Module):
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
        return x + gate * DenoiserMlp(4 * s.width, s.width, nn.gelu)(modulate(x, shift, scale))


class DenoiserMlp(nn.Module):
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


Batch = Mapping[str, jax.Array]

# Of DDPM's linear schedule, over its 1000 steps together (Ho et al. 2020).
_BETA_MIN, _BETA_MAX = 0.1, 20.0
# Where sampling starts; at 1 exactly the cosine schedule leaves nothing of the signal to divide by.
_LAST_TIME = 0.995


class Level(NamedTuple):
    """Shares of signal and noise in an image at some time: signal² + noise² = 1."""

    signal: jax.Array
    noise: jax.Array


def level_at(time: jax.Array, schedule: str) -> Level:
    """Return signal and noise at times from 0, the image, to 1, noise."""
    if schedule == "cosine":
        return Level(jnp.cos(time * jnp.pi / 2), jnp.sin(time * jnp.pi / 2))
    log_signal = -(time**2) * (_BETA_MAX - _BETA_MIN) / 4 - time * _BETA_MIN / 2
    # 1 - exp(2x) to the last digit, where x is near 0.
    return Level(jnp.exp(log_signal), jnp.sqrt(-jnp.expm1(2 * log_signal)))


def velocity_loss(
    params: Any, batch: Batch, rngs: jax.Array | None, settings: Settings
) -> tuple[jax.Array, jax.Array]:
    """Return the mean squared error of each image's velocity (B,), and ones (B,).

    Args:
        rngs: a key for each example, which draws its time, its noise, and whether its caption is
            hidden; None in evaluation: the example's content decides, and captions are given.
    """
    keys = jax.vmap(jax.random.key)(batch["seed"]) if rngs is None else rngs
    draw = partial(_draw_example, shape=settings.image_shape)
    time, noise, chance = jax.vmap(draw)(keys)
    is_conditioned = jnp.full(len(time), fill_value=True)
    if rngs is not None:
        is_conditioned = chance >= settings.caption_dropout
    level = _wide(level_at(time, settings.schedule))
    noised = level.signal * batch["image"] + level.noise * noise
    wanted = level.signal * noise - level.noise * batch["image"]
    found = _apply(params, settings, noised, time, batch["words"], is_conditioned)
    losses = jnp.mean(jnp.square(found - wanted), axis=(1, 2, 3))
    return losses, jnp.ones_like(losses)


def sample(params: Any, batch: Batch, rngs: jax.Array, settings: Settings) -> jax.Array:
    """Draw pictures (B, S, S, C), uint8, of the captions; an example's key decides its picture."""
    captions = _captions(params, batch["words"], settings)

    def velocity(noised: jax.Array, time: jax.Array) -> jax.Array:
        both, times = jnp.concatenate([noised, noised]), jnp.full(2 * len(noised), time)
        found = _apply(params, settings, both, times, captions, method="denoise")
        told, untold = jnp.split(found, 2)
        return untold + settings.guidance * (told - untold)

    times = jnp.linspace(_LAST_TIME, 0.0, settings.num_sampling_steps + 1)
    levels = level_at(times, settings.schedule)

    def step(index: jax.Array, noised: jax.Array) -> jax.Array:
        now, then = (Level(*(part[i] for part in levels)) for i in (index, index + 1))
        fresh = _noise(rngs, index + 1, settings)
        return ddim_step(noised, velocity(noised, times[index]), now, then, fresh, settings.eta)

    start = _noise(rngs, 0, settings)
    image = jax.lax.fori_loop(0, settings.num_sampling_steps, step, start)
    return jnp.round((jnp.clip(image, -1, 1) + 1) * 127.5).astype(jnp.uint8)


def ddim_step(
    noised: jax.Array, velocity: jax.Array, now: Level, then: Level, fresh: jax.Array, eta: float
) -> jax.Array:
    """Go from one level to one of less noise.

    Args:
        velocity: that of `noised`, by the network.
        fresh: noise that is added, times eta.
        eta: 0 is DDIM, 1 is DDPM (Song et al. 2021, equations 12 and 16).
    """
    # A network's error makes pixels blacker than black, which later steps would enlarge.
    image = jnp.clip(now.signal * noised - now.noise * velocity, -1, 1)
    noise = (noised - now.signal * image) / now.noise
    kept = (now.signal / then.signal) ** 2
    added = eta * then.noise / now.noise * jnp.sqrt(jnp.maximum(1 - kept, 0))
    turned = jnp.sqrt(jnp.maximum(then.noise**2 - added**2, 0))
    return then.signal * image + turned * noise + added * fresh


def _apply(params: Any, settings: Settings, *arguments: Any, method: str = "__call__") -> jax.Array:
    model: Any = DiffusionTransformer(settings)
    found: jax.Array = model.apply({"params": params}, *arguments, method=method)
    return found


def _captions(params: Any, words: jax.Array, settings: Settings) -> jax.Array:
    """Return the captions' vectors, and as many of no caption (2 B, D)."""
    is_conditioned = jnp.repeat(jnp.array([True, False]), len(words))
    both = jnp.concatenate([words, words])
    return _apply(params, settings, both, is_conditioned, method="encode")


def _draw_example(key: jax.Array, shape: tuple[int, ...]) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Draw a time, noise, and a number from 0 to 1."""
    for_time, for_noise, for_chance = jax.random.split(key, 3)
    # More often near 1, where the caption alone tells what the image is to be.
    time = 1 - jax.random.uniform(for_time) ** 2
    noise = jax.random.normal(for_noise, shape)
    return time, noise, jax.random.uniform(for_chance)


def _noise(rngs: jax.Array, number: jax.Array | int, settings: Settings) -> jax.Array:
    """Draw each example's noise of this number (B, S, S, C)."""

    def draw(key: jax.Array) -> jax.Array:
        return jax.random.normal(jax.random.fold_in(key, number), settings.image_shape)

    return jax.vmap(draw)(rngs)


def _wide(level: Level) -> Level:
    """Give (B,) the dims of images."""
    return Level(*(part[:, None, None, None] for part in level))
