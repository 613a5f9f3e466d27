"""Settings and row checks of the image_classification recipe: images and labels."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from pydantic import Field

from redco_flow.models.find import IMAGE_ENCODERS
from redco_flow.recipes.parts.images import ImageSettings, collate_images
from redco_flow.recipes.recipe import Batch, Class, Example

COLUMNS = ("image", "label")
TARGET = "label"
TARGETS = "classes"
FAMILIES = IMAGE_ENCODERS
DEFAULT_FAMILY = "vit"


class Settings(ImageSettings):
    """Keys of the pipeline's `settings`.

    Args:
        classes: the classes' names, of which the first is number 0; those of the data by default.
    """

    classes: list[Class] = Field(default_factory=list)


def collate_fn(examples: Sequence[Example], settings: Settings) -> Batch:
    """Return images (B, X, X, C) float32 and labels (B,) int32.

    Raises:
        ValueError: an image that is none, or a label that is no class.
    """
    labels = [_number_of(example["label"], settings.classes) for example in examples]
    return {
        "images": collate_images([example["image"] for example in examples], settings),
        "labels": np.array(labels, np.int32),
    }


def _number_of(label: Class, classes: Sequence[Class]) -> int:
    if label not in classes:
        raise ValueError(f"label {label!r} is none of {', '.join(map(str, classes))}.")
    return classes.index(label)
