"""The functions of a model that classifies images.

Dims in this file: B batch, X image side, C channels, Y classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import optax

from redco_flow.models.hub.pretrained import load_pretrained
from redco_flow.recipes.image_classification.config import Settings, collate_fn
from redco_flow.recipes.parts.images import augment, check_images
from redco_flow.recipes.parts.model import (
    ChosenModel,
    check_class_order,
    choose_sized_model,
    with_changes,
)
from redco_flow.recipes.recipe import Recipe

_CLASSIFIER = "classifier"


def build_classifier(model: Mapping[str, Any], settings: Settings) -> Recipe:
    """Make the recipe; see `recipes.image_classification.build`."""
    chosen = choose_sized_model(model, recipe="image_classification", sizes=_sizes(settings))
    check_class_order(chosen, settings.classes)
    config = _fitted(chosen, settings)
    module = chosen.module

    def scores(params: Any, batch: Mapping[str, jax.Array], _rngs: jax.Array) -> jax.Array:
        scores: jax.Array = module.apply(config, params, batch["images"])
        return scores

    def pred_fn(params: Any, batch: Mapping[str, jax.Array], rngs: jax.Array) -> jax.Array:
        return jnp.argmax(scores(params, batch, rngs), axis=-1)

    def with_config(changes: Mapping[str, Any]) -> Recipe:
        return build_classifier(with_changes(model, changes), settings)

    fitted = ChosenModel(chosen.family, module, config, chosen.directory)
    drawn = () if _has_this_head(chosen.config, config) else (_CLASSIFIER,)
    return Recipe(
        model={**fitted.record, "settings": settings.model_dump(mode="json")},
        init_params=partial(module.init_params, config),
        abstract_params=partial(module.abstract_params, config),
        load_params=_load_params(fitted, drawn),
        head_parts=_head_parts(module.abstract_params(config)),
        drawn_parts=() if chosen.directory is None else drawn,
        collate_fn=partial(collate_fn, settings=settings),
        loss_fn=partial(_losses, module, config, settings),
        make_pred_fn=lambda _generation: pred_fn,
        class_scores=scores,
        output_fn=lambda numbers: [settings.classes[int(number)] for number in numbers],
        save_pretrained=fitted.save if hasattr(module, "tensor_layouts") else None,
        with_config=with_config,
    )


def _sizes(settings: Settings) -> dict[str, int]:
    if not settings.classes:
        raise ValueError(
            "there are no classes: preprocessing finds them in the data, or give settings.classes."
        )
    return {
        "image_size": settings.image_size,
        "num_channels": settings.num_channels,
        "num_labels": len(settings.classes),
    }


def _fitted(chosen: ChosenModel, settings: Settings) -> Any:
    """Return the config with a classifier of the data's classes."""
    config = chosen.config
    check_images(config, settings)
    changes: dict[str, Any] = {"num_labels": len(settings.classes)}
    if hasattr(config, "has_classifier"):
        changes |= {"has_classifier": True, "has_pooler": False}
    return config.updated(changes)


def _has_this_head(published: Any, config: Any) -> bool:
    """Whether a model is published with a classifier of as many classes."""
    has_one = getattr(published, "has_classifier", True)
    return bool(has_one and published.num_labels == config.num_labels)


def _load_params(model: ChosenModel, drawn: tuple[str, ...]) -> Callable[[Any], Any] | None:
    """(shardings) -> the files' parameters, but for those that are drawn."""
    if model.directory is None:
        return None
    return partial(load_pretrained, model.directory, model.module, model.config, drawn=drawn)


def _head_parts(shapes: Any) -> tuple[str, ...]:
    has_classifier = isinstance(shapes, Mapping) and _CLASSIFIER in shapes
    return (_CLASSIFIER,) if has_classifier else ()


def _losses(
    module: ModuleType,
    config: Any,
    settings: Settings,
    params: Any,
    batch: Mapping[str, jax.Array],
    rngs: jax.Array,
    is_training: bool,  # noqa: FBT001 (the engine's order of arguments)
) -> tuple[jax.Array, jax.Array]:
    """Return each image's cross-entropy (B,), and that it counts once."""
    images = batch["images"]
    if is_training:
        images = augment(images, rngs, flip=settings.flip, shift=settings.shift)
    logits = module.apply(config, params, images, rngs=rngs if is_training else None)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
    return losses, jnp.ones_like(losses)
