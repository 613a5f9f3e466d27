"""Rows' images as arrays that a model reads: of one size and number of channels, normalised.

Light: Pillow is imported where an image is one of its own, or is to be resized; JAX to augment.
Dims in this file: B batch, X image side, C channels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from redco_flow.spec.model import NonNegativeInt, PositiveFloat, PositiveInt, StrictModel
from redco_flow.tracking.dataset_rows import upright

if TYPE_CHECKING:
    import jax

Pixels = NDArray[np.float32]

_GREY, _RGB = 1, 3
WHITE_OF_8_BITS = 255
# Pillow's modes of grey images with more bits a pixel.
_WIDE_MODES = ("I;16", "I;16B", "I;16L", "I;16N", "I", "F")
# ITU-R 601-2, as Pillow turns RGB into grey.
_LUMA = np.array([0.299, 0.587, 0.114], np.float32)

PerChannel = Annotated[list[float], Field(min_length=1, max_length=3)]


class ImageSettings(StrictModel):
    """Preprocessing of images, and their augmentation in training.

    Args:
        image_size: images are resized to this number of rows and columns.
        num_channels: 1 makes all of them grey, 3 RGB.
        max_value: what stands for white: 255 of files, 65535 of those with 16 bits a pixel; of
            arrays whatever they hold.
        mean, stddev: of each channel, or of all, after white became 1: a pixel becomes
            (pixel - mean) / stddev. Those of a published model are in its preprocessor_config.json.
        flip: whether half of the images are mirrored in training, left for right.
        shift: by how many pixels at most images are moved in training, in each direction.
    """

    image_size: PositiveInt = 224
    num_channels: Literal[1, 3] = 3
    max_value: PositiveFloat = 255.0
    mean: PerChannel = Field(default=[0.5])
    stddev: PerChannel = Field(default=[0.5])
    flip: bool = False
    shift: NonNegativeInt = 0

    @model_validator(mode="after")
    def _fits_the_channels(self) -> Self:
        for name in ("mean", "stddev"):
            if len(getattr(self, name)) not in (1, self.num_channels):
                raise ValueError(
                    f"'{name}' has {len(getattr(self, name))} numbers, and images have "
                    f"{self.num_channels} channels: give one for each, or one for all"
                )
        if min(self.stddev) <= 0:
            raise ValueError("'stddev' must be above 0")
        if self.shift >= self.image_size:
            raise ValueError("'shift' must be less than 'image_size': nothing would be left to see")
        return self


def check_images(config: Any, settings: ImageSettings) -> None:
    """Raise ValueError if a model's config is for other images than the settings."""
    for name in ("image_size", "num_channels"):
        if getattr(config, name) != getattr(settings, name):
            raise ValueError(
                f"the model's {name} is {getattr(config, name)}, and settings.{name} is "
                f"{getattr(settings, name)}: give settings.{name} the model's."
            )


def collate_images(values: Sequence[Any], settings: ImageSettings) -> Pixels:
    """Return images as (B, X, X, C), normalised.

    Args:
        values: Pillow's images, arrays or nested lists, (rows, columns) or with channels behind.

    Raises:
        ValueError: one of them is no image; says what it is.
    """
    return np.stack([_normalised(read_image(value, settings), settings) for value in values])


def read_image(value: Any, settings: ImageSettings) -> Pixels:
    """Return an image as (X, X, C) of numbers up to `settings.max_value`.

    Raises:
        ValueError: it is none.
    """
    size, num_channels = settings.image_size, settings.num_channels
    if type(value).__module__.startswith("PIL."):
        value = upright(value)
        if not is_wide(value, settings.max_value):
            return _with_channels(_from_pillow(value, size, num_channels), num_channels)
    pixels = _with_channels(_from_array(value), num_channels)
    return pixels if pixels.shape[:2] == (size, size) else _resized(pixels, size)


def split_by_image(example: Mapping[str, Any]) -> bytes:
    """Return what decides whether a row is held out: its image, whatever its caption."""
    return np.asarray(example["image"]).tobytes()


def is_wide(image: Any, white: float) -> bool:
    """Whether a Pillow image has pixels that 8 bits cannot hold: fractions, or up to more.

    Raises:
        ValueError: they are not finite, negative or above white: Pillow would cut them off.
    """
    if image.mode not in _WIDE_MODES:
        return False
    pixels = _from_array(image)
    if (smallest := pixels.min()) < 0 or (largest := pixels.max()) > white:
        found = f"of {smallest:g}" if smallest < 0 else f"up to {largest:g}"
        raise ValueError(
            f"an image with pixels {found}, where black is 0 and white is {white:g}: save it with "
            "8 bits a pixel, or give settings.max_value, where the recipe has it (65535 of files "
            "with 16 bits a pixel)."
        )
    return image.mode == "F" or white > WHITE_OF_8_BITS


def _from_pillow(image: Any, size: int, num_channels: int) -> Pixels:
    """Convert and resize in 8 bits a channel, as transformers does."""
    from PIL import Image

    converted = image.convert("L" if num_channels == _GREY else "RGB")
    if converted.size != (size, size):
        converted = converted.resize((size, size), Image.Resampling.BILINEAR)
    return np.asarray(converted, np.float32)


def _from_array(value: Any) -> Pixels:
    try:
        pixels = np.asarray(value, np.float32)
    except (TypeError, ValueError) as error:
        raise ValueError(f"no image: {error}") from error
    if pixels.ndim not in (2, 3) or 0 in pixels.shape:
        raise ValueError(
            f"no image: an array of shape {pixels.shape}; images are (rows, columns) or "
            "(rows, columns, channels)."
        )
    if not np.isfinite(pixels).all():
        raise ValueError("no image: some pixels are not finite.")
    return pixels


def _with_channels(pixels: Pixels, num_channels: int) -> Pixels:
    """Return (rows, columns, C), grey or RGB."""
    if pixels.ndim == 2:
        pixels = pixels[..., None]
    if pixels.shape[-1] == num_channels:
        return pixels
    if pixels.shape[-1] == _GREY:
        return np.repeat(pixels, num_channels, axis=-1)
    if pixels.shape[-1] == _RGB:
        return (pixels @ _LUMA)[..., None]
    raise ValueError(
        f"no image: an array of shape {pixels.shape}, whose last dim is the channels: "
        f"{_GREY} or {_RGB}."
    )


def _resized(pixels: Pixels, size: int) -> Pixels:
    """Resize each channel, bilinearly."""
    try:
        from PIL import Image
    except ImportError as error:
        raise ValueError(
            f"an array of {pixels.shape[:2]} is to be resized to {size} by Pillow, which is not "
            "installed: pip install 'redco-flow[vision]'."
        ) from error
    channels = [
        Image.fromarray(np.ascontiguousarray(channel)).resize(
            (size, size), Image.Resampling.BILINEAR
        )
        for channel in np.moveaxis(pixels, -1, 0)
    ]
    return np.stack([np.asarray(channel, np.float32) for channel in channels], axis=-1)


def _normalised(pixels: Pixels, settings: ImageSettings) -> Pixels:
    mean, stddev = (np.array(x, np.float32) for x in (settings.mean, settings.stddev))
    return (pixels / np.float32(settings.max_value) - mean) / stddev


def augment(images: jax.Array, rngs: jax.Array, *, flip: bool, shift: int) -> jax.Array:
    """Return the images (B, X, X, C), mirrored or moved.

    Args:
        rngs: a key for each (B,).
        flip: whether half of them are mirrored, left for right.
        shift: by how many pixels at most they are moved, in each direction; what comes in at a
            side repeats its last row or column.
    """
    if not flip and not shift:
        return images
    import jax
    import jax.numpy as jnp

    def vary(image: jax.Array, rng: jax.Array) -> jax.Array:
        to_flip, to_move = jax.random.split(rng)
        if flip:
            image = jnp.where(jax.random.bernoulli(to_flip), image[:, ::-1], image)
        if not shift:
            return image
        padded = jnp.pad(image, ((shift, shift), (shift, shift), (0, 0)), mode="edge")
        row, column = jax.random.randint(to_move, (2,), 0, 2 * shift + 1)
        return jax.lax.dynamic_slice(padded, (row, column, 0), image.shape)

    return jax.vmap(vary)(images, rngs)
