"""image_classification: which class an image is of, by a ViT, or by a small CNN.

The recipe's face. `collate_fn` is light and checks rows in preprocessing; `build` brings the model
in, and JAX with it.
"""

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


def build(model: Mapping[str, Any], settings: Settings) -> Recipe:
    """Make the recipe around a model.

    Args:
        model: the keys of a pipeline's `model` section, or a `Recipe.model` of before. A family of
            one's own has, besides `Config`, `init_params`, `abstract_params` and
            `apply(config, params, images, rngs) -> logits`.

    Raises:
        ValueError: an unknown family or config key, or a model of images of another size.
    """
    from redco_flow.recipes.image_classification.run import build_classifier

    return build_classifier(model, settings)
