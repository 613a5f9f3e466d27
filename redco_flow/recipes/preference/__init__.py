"""preference: of two answers to a prompt the better one, by DPO, IPO, ORPO or SimPO."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from redco_flow.recipes.language_modeling.config import DEFAULT_FAMILY, FAMILIES
from redco_flow.recipes.preference.config import (
    COLUMNS,
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

SAME_MODEL_AS = "language_modeling"


def build(model: Mapping[str, Any], texts: TokenLengths, settings: Settings) -> Recipe:
    """Make the recipe around a model."""
    from redco_flow.recipes.preference.run import build_preference

    return build_preference(model, texts, settings)
