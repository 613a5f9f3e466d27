"""language_modeling: the next token, by a decoder-only model such as GPT-2 or LLaMA.

Of plain texts (`data.text_key`), or of a target after a prompt (`data.source_key` and
`data.target_key`), where the target"s tokens alone are learnt: instruction tuning. The recipe"s
face. `encode` and `encode_texts` are light and run in preprocessing; `build` brings the model in,
and JAX with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from redco_flow.recipes.language_modeling.config import (
    CAN_PACK,
    DEFAULT_FAMILY,
    FAMILIES,
    MEASURES_PERPLEXITY,
    encode,
    encode_texts,
)
from redco_flow.recipes.recipe import Recipe
from redco_flow.text.tokenizer import TextTokenizer

__all__ = [
    "CAN_PACK",
    "DEFAULT_FAMILY",
    "FAMILIES",
    "MEASURES_PERPLEXITY",
    "build",
    "encode",
    "encode_texts",
]


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
        source_length, target_length: of the longest prompt and target, in tokens; a batch's rows
            have room for both.

    Raises:
        ValueError: an unknown family or config key, a model that is not decoder-only, or one that
            fits neither the tokenizer nor rows of such a length.
    """
    from redco_flow.recipes.language_modeling.run import build_decoder_only

    return build_decoder_only(
        model, tokenizer, source_length=source_length, target_length=target_length
    )
