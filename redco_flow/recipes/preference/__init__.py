"""preference: of two answers to a prompt the better one, by DPO, IPO, ORPO or SimPO.

The recipe's face. `collate_fn` and `encode_row` are light and run in preprocessing; `build` brings
the model in, and JAX with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from redco_flow.recipes.preference.config import (
    COLUMNS,
    DEFAULT_FAMILY,
    FAMILIES,
    SAME_MODEL_AS,
    TAKES_MESSAGES,
    TEXT_COLUMNS,
    Settings,
    collate_fn,
    conversations,
    encode_row,
    needs_reference,
    split_key,
)
from redco_flow.recipes.recipe import Recipe, TokenLengths

__all__ = [
    "COLUMNS",
    "DEFAULT_FAMILY",
    "FAMILIES",
    "SAME_MODEL_AS",
    "TAKES_MESSAGES",
    "TEXT_COLUMNS",
    "Settings",
    "build",
    "collate_fn",
    "conversations",
    "encode_row",
    "needs_reference",
    "split_key",
]


def build(model: Mapping[str, Any], texts: TokenLengths, settings: Settings) -> Recipe:
    """Make the recipe around a model.

    Args:
        model: the keys of a pipeline's `model` section, or a `Recipe.model` of before. Without a
            `dropout_rate` there is no dropout: the reference has none either.
        texts: the tokenizer, and the longest prompt and answer in tokens.

    Raises:
        ValueError: an unknown family or config key, a model that is not decoder-only, or one that
            fits neither the tokenizer nor rows of such a length.
    """
    from redco_flow.recipes.preference.run import build_preference

    return build_preference(model, texts, settings)
