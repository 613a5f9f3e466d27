"""image_to_text: a caption for an image, by a ViT and a GPT-2 that attends to what it encodes."""

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
from redco_flow.recipes.parts.images import split_by_image as split_key
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
    "split_key",
]


def build(model: Mapping[str, Any], tokenizer: TextTokenizer, settings: Settings) -> Recipe:
    """Make the recipe around a model."""
    from redco_flow.recipes.image_to_text.run import build_captioner

    return build_captioner(model, tokenizer, settings)
