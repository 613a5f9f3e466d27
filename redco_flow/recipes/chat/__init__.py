"""chat: answers in conversations, by a decoder-only model such as LLaMA or Qwen.

The recipe's face. `encode` is light and runs in preprocessing; `build` brings the model in, and
JAX with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from redco_flow.recipes.chat.config import (
    CAN_PACK,
    DEFAULT_FAMILY,
    FAMILIES,
    MEASURES_PERPLEXITY,
    SAME_MODEL_AS,
    TAKES_CONVERSATIONS,
    encode,
)
from redco_flow.recipes.recipe import Recipe
from redco_flow.text.tokenizer import TextTokenizer

__all__ = [
    "CAN_PACK",
    "DEFAULT_FAMILY",
    "FAMILIES",
    "MEASURES_PERPLEXITY",
    "SAME_MODEL_AS",
    "TAKES_CONVERSATIONS",
    "build",
    "encode",
]


def build(
    model: Mapping[str, Any],
    tokenizer: TextTokenizer,
    *,
    source_length: int,
    target_length: int,
) -> Recipe:
    """Make the recipe around a model: language_modeling's, of rows that are whole conversations.

    Args:
        model: the keys of a pipeline's `model` section, or a `Recipe.model` of before.
        tokenizer: the one that made the data.
        source_length, target_length: of the longest prompt and conversation, in tokens.

    Raises:
        ValueError: as of language_modeling.
    """
    from redco_flow.recipes.language_modeling.run import build_decoder_only

    return build_decoder_only(
        model, tokenizer, source_length=source_length, target_length=target_length, is_whole=True
    )
