"""text_to_text: a source text in, a target text out, by an encoder-decoder such as T5."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from redco_flow.recipes.recipe import Recipe
from redco_flow.recipes.text_to_text.config import DEFAULT_FAMILY, FAMILIES, encode
from redco_flow.text.tokenizer import TextTokenizer

__all__ = ["DEFAULT_FAMILY", "FAMILIES", "build", "encode"]


def build(
    model: Mapping[str, Any], tokenizer: TextTokenizer, *, source_length: int, target_length: int
) -> Recipe:
    """Make the recipe around a model."""
    from redco_flow.recipes.text_to_text.run import build_encoder_decoder

    return build_encoder_decoder(
        model, tokenizer, source_length=source_length, target_length=target_length
    )
