"""The typed settings of a user's own recipe: what its `Settings` has are keys of `settings`.

A dataclass or a pydantic model, checked as strictly as every other section: unknown keys are
errors, nothing is coerced.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Annotated, Any

from pydantic import BaseModel, PydanticSchemaGenerationError, TypeAdapter, create_model

from redco_flow.spec.model import OnlyWhereSet, StrictModel
from redco_flow.spec.names import import_named, named_module
from redco_flow.spec.stage_kind import StageConfig, StageKind

RECIPES_PACKAGE = "redco_flow.recipes"
SETTINGS = "Settings"


def read_settings(settings_type: type, values: Mapping[str, Any]) -> Any:
    """Return a recipe's `Settings` with values that were checked before."""
    return TypeAdapter(settings_type).validate_python(dict(values))


def values_of(settings: Mapping[str, Any] | BaseModel) -> dict[str, Any]:
    """Return a Config's `settings` as JSON values; a plan has them typed, a job does not."""
    return settings.model_dump(mode="json") if isinstance(settings, BaseModel) else dict(settings)


@cache
def settings_model(settings_type: type) -> type[StrictModel]:
    """Return the strict model of a `Settings` class.

    Raises:
        ValueError: it is neither a dataclass nor a pydantic model, or a field's type is unknown.
    """
    name = f"{SETTINGS} of {settings_type.__module__}"
    if isinstance(settings_type, type) and issubclass(settings_type, BaseModel):
        return type(SETTINGS, (settings_type, StrictModel), {"__doc__": settings_type.__doc__})
    if not dataclasses.is_dataclass(settings_type):
        raise ValueError(f"{name} must be a dataclass or a pydantic model.")
    try:
        types = typing.get_type_hints(settings_type, include_extras=True)
        fields: dict[str, Any] = {
            field.name: (types[field.name], _default(field))
            for field in dataclasses.fields(settings_type)
        }
        model: type[StrictModel] = create_model(
            SETTINGS, __base__=StrictModel, __doc__=settings_type.__doc__, **fields
        )
    except (NameError, PydanticSchemaGenerationError) as error:
        raise ValueError(f"{name}: {error}") from error
    return model


def kind_with_settings(kind: StageKind, settings_type: type) -> StageKind:
    """Return a kind with a Config whose `settings`, if it takes them, are those of a recipe.

    Raises:
        ValueError: as `settings_model`.
    """
    if "settings" not in kind.sections:
        return kind
    return replace(kind, config_type=_with_settings(kind.config_type, settings_type))


def _with_settings(config_type: type[StageConfig], settings_type: type) -> type[StageConfig]:
    model = settings_model(settings_type)
    needs_some = any(field.is_required() for field in model.model_fields.values())
    default: Any = ... if needs_some else model()
    kind: Any = Annotated[model, OnlyWhereSet()]
    changed: type[StageConfig] = create_model(
        config_type.__name__,
        __base__=config_type,
        __doc__=config_type.__doc__,
        settings=(kind, default),
    )
    return changed


def settings_type_of(recipe: str) -> type | None:
    """Return the `Settings` of the recipe that YAML names; None where it has none.

    Raises:
        ValueError: there is no such module, or it fails while it is imported.
    """
    return getattr(import_named(named_module(RECIPES_PACKAGE, recipe)), SETTINGS, None)


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return ...
