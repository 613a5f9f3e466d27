"""Make the `Recipe` of a module: by its own `build`, or of its three functions.

Light at the top: preprocessing asks for a collate_fn alone.
Dims in this file: B batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import numpy as np

from redco_flow.recipes.recipe import (
    Collate,
    Recipe,
    TokenLengths,
    builds,
    encodes,
    encodes_rows,
    find_recipe,
    text_columns,
)
from redco_flow.spec.recipe_settings import SETTINGS, read_settings


def build_recipe(name: str, model: Mapping[str, Any], texts: TokenLengths | None) -> Recipe:
    """Make the recipe that YAML names.

    Args:
        model: the keys of a pipeline's `model` section, with `settings` where the recipe has some;
            or a `Recipe.model` of before.
        texts: what the dataset's token ids are; None of rows that nothing was made of.

    Raises:
        ValueError: there is no such recipe, or its own says that something does not fit.
    """
    module, settings = find_recipe(name), model.get("settings") or {}
    if not builds(module):
        return recipe_of(module, settings)
    own = {"settings": read_settings(module, settings)} if hasattr(module, SETTINGS) else {}
    built: Recipe
    if not encodes(module) and not text_columns(module):
        built = module.build(model, **own)
        return built
    if texts is None:
        raise ValueError(f"recipe '{name}' is of texts, and the dataset has rows alone.")
    if not encodes(module):
        built = module.build(model, texts if encodes_rows(module) else texts.tokenizer, **own)
        return built
    built = module.build(
        model,
        texts.tokenizer,
        source_length=texts.source_length,
        target_length=texts.target_length,
        **own,
    )
    return built


def collate_rows(name: str, settings: Mapping[str, Any]) -> Collate:
    """Return the collate_fn of a recipe of rows, for which no model is made.

    Args:
        settings: as they stand in YAML.
    """
    module = find_recipe(name)
    last = (read_settings(module, settings),) if hasattr(module, SETTINGS) else ()
    return lambda examples: module.collate_fn(examples, *last)


def recipe_of(module: ModuleType, settings: Mapping[str, Any]) -> Recipe:
    """Bind a module's functions to the settings.

    Args:
        settings: as they stand in YAML.
    """
    last = (read_settings(module, settings),) if hasattr(module, SETTINGS) else ()

    def bound(name: str) -> Callable[..., Any]:
        function = getattr(module, name)
        return lambda *arguments: function(*arguments, *last)

    def abstract_params() -> Any:
        import jax

        return jax.eval_shape(init_params, jax.random.key(0))

    init_params, pred_fn = bound("init_params"), bound("pred_fn")
    to_outputs = bound("output_fn") if hasattr(module, "output_fn") else rows_of
    return Recipe(
        model={"settings": dict(settings)} if last else {},
        init_params=init_params,
        abstract_params=abstract_params,
        collate_fn=bound("collate_fn"),
        loss_fn=bound("loss_fn"),
        make_pred_fn=lambda _generation: pred_fn,
        output_fn=lambda found: [as_json(row) for row in to_outputs(found)],
    )


def rows_of(found: Any) -> list[Any]:
    """Cut a tree of arrays (B, ...) into B trees."""
    import jax

    count = len(jax.tree.leaves(found)[0])
    return [jax.tree.map(lambda x, row=row: x[row], found) for row in range(count)]


def as_json(value: Any) -> Any:
    """Return a prediction's arrays and NumPy numbers as lists and numbers."""
    if isinstance(value, Mapping):
        return {str(key): as_json(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(one) for one in value]
    return np.asarray(value).tolist() if hasattr(value, "__array__") else value
