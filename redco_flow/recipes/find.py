"""Find the recipe that a pipeline names: one of this package, or any importable module."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Annotated, Any

from pydantic import AfterValidator, ValidationInfo

from redco_flow import recipes
from redco_flow.recipes.declared import DeclaredRecipe, read_recipe
from redco_flow.spec.model import OnlyWhereSet, Text
from redco_flow.spec.names import find_module, import_named, known_packages, named_module
from redco_flow.spec.recipe_settings import SETTINGS, settings_model


def recipe_module(name: str) -> str:
    """Return a recipe's dotted module: its name in this package, or the one that `name` gives."""
    return named_module(recipes.__name__, name)


def find_recipe(name: str) -> DeclaredRecipe:
    """Import a recipe and read what it declares.

    Raises:
        ValueError: there is no such module, or it lacks a function.
    """
    try:
        module = import_named(recipe_module(name))
    except ValueError as error:
        raise ValueError(f"recipe '{name}': {error}") from error
    try:
        return read_recipe(name, module)
    except ValueError as error:
        raise ValueError(f"the recipe module '{name}' {error}") from error


def find_recipe_if_any(name: str) -> DeclaredRecipe | None:
    """Return a recipe; None where it cannot be read, which is reported where it is checked."""
    try:
        return find_recipe(name)
    except ValueError:
        return None


def find_own_recipe(name: str) -> DeclaredRecipe | None:
    """Return a recipe of this package around the pipeline's model, which is light; None of others.

    A plan imports no other: the machine that plans may lack what a user's module imports.
    """
    if not name.isidentifier() or importlib.util.find_spec(recipe_module(name)) is None:
        return None
    has_build = hasattr(importlib.import_module(recipe_module(name)), "build")
    return find_recipe(name) if has_build else None


def shares_model(one: str, other: str) -> bool:
    """Whether two recipes train the same model, so that each reads the other's checkpoints."""
    return find_recipe(one).same_model_as == find_recipe(other).same_model_as


def family_problem(recipe: DeclaredRecipe, family: str) -> str | None:
    """Say why a recipe does not train a family, or None where it does."""
    if recipe.families is None or family in recipe.families:
        return None
    other = _recipe_of(family)
    advice = f"; for '{family}' use recipe {other}" if other else ""
    return (
        f"recipe '{recipe.name}' trains {', '.join(recipe.families)}, and not '{family}'{advice}."
    )


def _recipe_of(family: str) -> str | None:
    """Return a recipe of this package that trains a family; one that generates texts comes first.

    Those that train the model of another recipe in another way are not considered.
    """
    own = map(find_recipe, known_packages(recipes.__name__, having="config"))
    names = sorted(
        (one.targets is not None, one.name)
        for one in own
        if one.same_model_as == one.name and family in (one.families or ())
    )
    return names[0][1] if names else None


def _checked_recipe(name: str) -> str:
    """Return the name of a recipe, after a look at its module where it is a user's.

    Raises:
        ValueError: it cannot be imported, or lacks a function.
    """
    if name.isidentifier():
        return name
    try:
        exists = find_module(recipes.__name__, name) is not None
    except ValueError:
        exists = False
    # A missing module is reported where the pipeline is read.
    if exists and (settings_type := find_recipe(name).settings_type) is not None:
        settings_model(settings_type)
    return name


def _checked_settings(settings: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
    """Return a Config's settings."""
    name = info.data.get("recipe")  # an error of the recipe is reported as such
    if settings and name is not None and find_recipe(name).settings_type is None:
        raise ValueError(f"recipe '{name}' has no settings: its module has no class {SETTINGS}.")
    return settings


RecipeName = Annotated[Text, AfterValidator(_checked_recipe)]
"""The type of a Config's `recipe`: a user's module has what a recipe needs."""

RecipeSettings = Annotated[dict[str, Any], AfterValidator(_checked_settings), OnlyWhereSet()]
"""The type of a Config's `settings`, after its `recipe`; a pipeline's are typed by the recipe."""
