"""classification: which class a text, or a pair of texts, is of; by BERT, RoBERTa or a decoder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from redco_flow.recipes.classification.config import (
    DEFAULT_FAMILY,
    FAMILIES,
    TAKES_PAIRS,
    TARGETS,
    Settings,
    encode,
)
from redco_flow.recipes.recipe import Recipe
from redco_flow.text.tokenizer import TextTokenizer

__all__ = ["DEFAULT_FAMILY", "FAMILIES", "TAKES_PAIRS", "TARGETS", "Settings", "build", "encode"]

SCORES_CLASSES = True


def build(
    model: Mapping[str, Any],
    tokenizer: TextTokenizer,
    *,
    source_length: int,
    target_length: int,
    settings: Settings,
) -> Recipe:
    """Make the recipe around a model."""
    from redco_flow.recipes.parts.labelled_texts import Task, build_labelled_texts

    if not settings.classes:
        raise ValueError("a classification is of classes, and settings.classes has none.")
    task = Task(tuple(settings.classes))
    lengths = {"source_length": source_length, "target_length": target_length}
    return build_labelled_texts(model, tokenizer, task, **lengths)
