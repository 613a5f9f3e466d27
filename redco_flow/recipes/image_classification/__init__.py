"""image_classification: which class an image is of, by a ViT, or by a small CNN."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from redco_flow.recipes.image_classification.config import (
    COLUMNS,
    DEFAULT_FAMILY,
    FAMILIES,
    TARGET,
    TARGETS,
    Settings,
    collate_fn,
)
from redco_flow.recipes.recipe import Recipe

__all__ = [
    "COLUMNS",
    "DEFAULT_FAMILY",
    "FAMILIES",
    "TARGET",
    "TARGETS",
    "Settings",
    "build",
    "collate_fn",
]

SCORES_CLASSES = True


def build(model: Mapping[str, Any], settings: Settings) -> Recipe:
    """Make the recipe around a model."""
    from redco_flow.recipes.image_classification.run import build_classifier

    return build_classifier(model, settings)
