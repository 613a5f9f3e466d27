"""text_to_text: a source text in, a target text out, by an encoder-decoder such as T5.

The recipe"s face. `encode` is light and runs in preprocessing; `build` brings the model in, and
JAX with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from redco_flow.recipes.recipe import Recipe
from redco_flow.recipes.text_to_text.config import DEFAULT_FAMILY, FAMILIES, encode
from redco_flow.text.tokenizer import TextTokenizer

__all__ = ["DEFAULT_FAMILY", "FAMILIES", "build", "encode"]


def build(
    model: Mapping[str, Any],
    tokenizer: TextTokenizer,
    *,
    source_length: int,
    target_length: int,
) -> Recipe:
    """Make the recipe around a model.

    Args:
        model: the keys of a pipeline's `model` section, or a `Recipe.model` of before.
        tokenizer: the one that made the data.
        source_length, target_length: what every batch is padded to, in tokens.

    Raises:
        ValueError: an unknown family or config key, or a model that does not fit the tokenizer.
    """
    from redco_flow.recipes.text_to_text.run import build_encoder_decoder

    return build_encoder_decoder(
        model, tokenizer, source_length=source_length, target_length=target_length
    )
