"""The settings of text_to_image, and how rows become batches: pixels, and captions' words hashed.

Captions need no tokenizer: a word is two numbers of its CRC, each a row of one embedding table, so
that two words are the same only if both are (Bloom embeddings, Serrà and Karatzoglou 2017).
Dims in this file: B batch, S side of an image, C channels, W words.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from redco_flow.recipes.parts.images import WHITE_OF_8_BITS, is_wide
from redco_flow.tracking.dataset_rows import upright

COLUMNS = ("image", "caption")
TARGET = "image"

_WORD = re.compile(r"\w+|[^\w\s]")


@dataclass(frozen=True)
class Settings:
    """The model, how it is trained, and how it draws.

    Args:
        image_size: pixels a side; all images have this size.
        num_channels: 1 of grey images, 3 of colours.
        patch_size: pixels a side of a patch, which is a token of the transformer.
        width: of a token.
        num_layers, num_heads: of the transformer.
        max_words: of a caption.
        num_word_rows: of the table of words.
        schedule: how signal turns into noise: `cosine`, or `linear` in DDPM's beta.
        caption_dropout: share of the captions that training hides, which guidance needs.
        guidance: how far a picture is pushed from one of no caption to one of its caption; 1 is
            not at all.
        num_sampling_steps: from noise to a picture.
        eta: 0 is DDIM, which draws noise once; 1 is DDPM, which does at each step.
    """

    image_size: int = 16
    num_channels: Literal[1, 3] = 1
    patch_size: int = 2
    width: int = 128
    num_layers: int = 4
    num_heads: int = 4
    max_words: int = 16
    num_word_rows: int = 1024
    schedule: Literal["cosine", "linear"] = "cosine"
    caption_dropout: float = 0.1
    guidance: float = 2.0
    num_sampling_steps: int = 30
    eta: float = 0.0

    def __post_init__(self) -> None:
        """Check what belongs together.

        Raises:
            ValueError: it does not.
        """
        if self.image_size % self.patch_size:
            raise ValueError(
                f"image_size is {self.image_size}, which patch_size, {self.patch_size}, must divide"
            )
        if self.width % (2 * self.num_heads):
            raise ValueError(
                f"width is {self.width}, which twice num_heads, {2 * self.num_heads}, must divide"
            )
        if not 0 <= self.caption_dropout < 1:
            raise ValueError(f"caption_dropout is {self.caption_dropout}: from 0 to below 1")
        if not 0 <= self.eta <= 1:
            raise ValueError(f"eta is {self.eta}: from 0 (DDIM) to 1 (DDPM)")

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(S, S, C)."""
        return (self.image_size, self.image_size, self.num_channels)


def collate_fn(examples: Sequence[Mapping[str, Any]], settings: Settings) -> dict[str, Any]:
    """Return images (B, S, S, C) from -1 to 1, word numbers (B, W, 2), and seeds (B,).

    An example's seed is of its content: evaluations draw its noise by it, so that they repeat
    each other whatever the batches.

    Raises:
        ValueError: an image of another size or kind, or a caption with too many words.
    """
    images = [image_of(example["image"], settings) for example in examples]
    words = [hash_words(example["caption"], settings) for example in examples]
    contents = zip(images, words, strict=True)
    seeds = [zlib.crc32(image.tobytes() + row.tobytes()) for image, row in contents]
    pixels = np.stack(images).astype(np.float32)
    return {
        "image": pixels / 127.5 - 1,
        "words": np.stack(words),
        "seed": np.array(seeds, np.uint32),
    }


def image_of(image: Any, settings: Settings) -> NDArray[np.uint8]:
    """Return an array's or a Pillow image's pixels (S, S, C).

    Raises:
        ValueError: it has another size, or more than 8 bits a pixel.
    """
    if hasattr(image, "convert"):
        image = upright(image)
        if is_wide(image, WHITE_OF_8_BITS):
            raise ValueError("the image has fractions as pixels, and pixels are from 0 to 255.")
        image = image.convert("L" if settings.num_channels == 1 else "RGB")
    pixels = np.asarray(image)
    if pixels.dtype != np.uint8:
        raise ValueError(f"the image is {pixels.dtype}, and pixels are uint8, from 0 to 255.")
    if pixels.size != math.prod(settings.image_shape) or pixels.shape[0] != settings.image_size:
        raise ValueError(
            f"the image has shape {pixels.shape}, and settings.image_size and "
            f"settings.num_channels say {settings.image_shape}."
        )
    return pixels.reshape(settings.image_shape)


def hash_words(caption: str, settings: Settings) -> NDArray[np.int32]:
    """Return two numbers for each word (W, 2), from 1 to the table's last row; 0 is no word.

    Raises:
        ValueError: no text, or more words than `max_words`.
    """
    if not isinstance(caption, str):
        raise ValueError(f"the caption is no text, but a {type(caption).__name__}.")
    words = _WORD.findall(caption.casefold())
    if len(words) > settings.max_words:
        raise ValueError(
            f"the caption has {len(words)} words, and settings.max_words is {settings.max_words}."
        )
    found = np.zeros((settings.max_words, 2), np.int32)
    for row, word in zip(found, words, strict=False):
        row[:] = [number % (settings.num_word_rows - 1) + 1 for number in _two_numbers(word)]
    return found


def _two_numbers(word: str) -> tuple[int, int]:
    """Return the halves of a word's CRC."""
    return divmod(zlib.crc32(word.encode("utf-8", "surrogatepass")), 1 << 16)
