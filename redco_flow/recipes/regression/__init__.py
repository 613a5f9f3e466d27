"""regression: a number for a text, or a pair of texts; by BERT, RoBERTa or a decoder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from redco_flow.recipes.classification.config import DEFAULT_FAMILY, FAMILIES, TAKES_PAIRS, encode
from redco_flow.recipes.recipe import NUMBERS, Recipe
from redco_flow.text.tokenizer import TextTokenizer

__all__ = ["DEFAULT_FAMILY", "FAMILIES", "TAKES_PAIRS", "TARGETS", "build", "encode"]

TARGETS = NUMBERS


def build(
    model: Mapping[str, Any], tokenizer: TextTokenizer, *, source_length: int, target_length: int
) -> Recipe:
    """Make the recipe around a model."""
    from redco_flow.recipes.parts.labelled_texts import Task, build_labelled_texts

    lengths = {"source_length": source_length, "target_length": target_length}
    return build_labelled_texts(model, tokenizer, Task(()), **lengths)
