"""chat: answers in conversations, by a decoder-only model such as LLaMA or Qwen.

Supervised finetuning with a tokenizer's chat template, where the assistant's turns alone are
learnt.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from redco_flow.recipes.chat.config import TAKES_CONVERSATIONS, encode
from redco_flow.recipes.language_modeling.config import DEFAULT_FAMILY, FAMILIES
from redco_flow.recipes.recipe import Recipe
from redco_flow.text.tokenizer import TextTokenizer

__all__ = ["DEFAULT_FAMILY", "FAMILIES", "TAKES_CONVERSATIONS", "build", "encode"]

CAN_PACK = True
MEASURES_PERPLEXITY = True
SAME_MODEL_AS = "language_modeling"


def build(
    model: Mapping[str, Any], tokenizer: TextTokenizer, *, source_length: int, target_length: int
) -> Recipe:
    """Make the recipe around a model."""
    from redco_flow.recipes.language_modeling.run import build_decoder_only

    return build_decoder_only(
        model, tokenizer, source_length=source_length, target_length=target_length, is_whole=True
    )
