"""image_to_text: a caption for an image, by a ViT and a GPT-2 that attends to what it encodes.

The recipe's face. `collate_fn` is light and checks rows in preprocessing; `build` brings the model
in, and JAX with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from redco_flow.recipes.image_to_text.config import (
    COLUMNS,
    DEFAULT_FAMILY,
    FAMILIES,
    TARGET,
    TEXT_COLUMNS,
    Settings,
    collate_fn,
    is_truncated,
)
from redco_flow.recipes.recipe import Recipe
from redco_flow.text.tokenizer import TextTokenizer

__all__ = [
    "COLUMNS",
    "DEFAULT_FAMILY",
    "FAMILIES",
    "TARGET",
    "TEXT_COLUMNS",
    "Settings",
    "build",
    "collate_fn",
    "is_truncated",
]


def build(model: Mapping[str, Any], tokenizer: TextTokenizer, settings: Settings) -> Recipe:
    """Make the recipe around a model.

    Args:
        model: the keys of a pipeline's `model` section, or a `Recipe.model` of before.
        tokenizer: of the captions.

    Raises:
        ValueError: an unknown family or config key, a model of images of another size, or one
            that does not fit the tokenizer.
    """
    from redco_flow.recipes.image_to_text.run import build_captioner

    return build_captioner(model, tokenizer, settings)
