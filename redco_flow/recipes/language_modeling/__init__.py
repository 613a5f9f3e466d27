"""language_modeling: the next token, by a decoder-only model such as GPT-2 or LLaMA.

Of plain texts (`data.text_key`), or of a target after a prompt (`data.source_key` and
`data.target_key`), where the target's tokens alone are learnt: instruction tuning.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from redco_flow.recipes.language_modeling.config import (
    DEFAULT_FAMILY,
    FAMILIES,
    encode,
    encode_texts,
)
from redco_flow.recipes.recipe import Recipe
from redco_flow.text.tokenizer import TextTokenizer

__all__ = ["DEFAULT_FAMILY", "FAMILIES", "build", "encode", "encode_texts"]

CAN_PACK = True
MEASURES_PERPLEXITY = True


def build(
    model: Mapping[str, Any], tokenizer: TextTokenizer, *, source_length: int, target_length: int
) -> Recipe:
    """Make the recipe around a model."""
    from redco_flow.recipes.language_modeling.run import build_decoder_only

    return build_decoder_only(
        model, tokenizer, source_length=source_length, target_length=target_length
    )
