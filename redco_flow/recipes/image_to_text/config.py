"""Settings and row checks of the image_to_text recipe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from redco_flow.models.find import IMAGE_TO_TEXT
from redco_flow.recipes.parts.images import ImageSettings, collate_images
from redco_flow.recipes.recipe import Batch, Example
from redco_flow.text.pairs import encode_ending
from redco_flow.text.tokenizer import TextTokenizer

COLUMNS = ("image", "caption")
TARGET = "caption"
TEXT_COLUMNS = ("caption",)
FAMILIES = IMAGE_TO_TEXT
DEFAULT_FAMILY = "vision_encoder_decoder"


class Settings(ImageSettings):
    """Keys of the pipeline's `settings`.

    Args:
        max_length: tokens of a caption, the end token included; more is cut off.
    """

    max_length: Annotated[int, Field(ge=2)] = 32


def is_truncated(row: Example, tokenizer: TextTokenizer, settings: Settings) -> bool:
    """Whether a row's caption has more tokens than the model reads of it."""
    encoded = encode_ending([row["caption"]], tokenizer, settings.max_length, [tokenizer.eos_id])
    return encoded.is_cut[0]


def collate_fn(examples: Sequence[Example], settings: Settings) -> Batch:
    """Return images (B, X, X, C) float32; captions are looked at alone.

    Raises:
        ValueError: an image that is none, or a caption that is no text.
    """
    for example in examples:
        caption = example["caption"]
        if not isinstance(caption, str) or not caption.strip():
            raise ValueError(f"caption {caption!r} is no text.")
    return {"images": collate_images([example["image"] for example in examples], settings)}
