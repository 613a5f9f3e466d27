"""Walk the fields of models: which keys exist below which, and which fields carry a mark.

Knows Pydantic's field descriptions; knows no pipeline.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

_MAX_LEVELS = 8


def submodels(annotation: Any) -> list[type[BaseModel]]:
    """Return the models that a field of this type can hold: `Model | None` holds one."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    origin = typing.get_origin(annotation)
    if origin is Annotated:
        return submodels(typing.get_args(annotation)[0])
    if origin in (typing.Union, types.UnionType):
        return [model for part in typing.get_args(annotation) for model in submodels(part)]
    return []


def is_open(annotation: Any) -> bool:
    """Tell whether a field of this type takes any keys: `dict[str, …]`."""
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType, Annotated):
        return any(is_open(part) for part in typing.get_args(annotation))
    return dict in (origin, annotation)


def known_keys(model: type[BaseModel], path: tuple[str | int, ...] = ()) -> set[str] | None:
    """Return the keys that exist at `path` of a model; None where any key may stand, or none."""
    models: list[type[BaseModel]] = [model]
    annotations: list[Any] = []
    for part in path:
        if isinstance(part, int):
            annotations = [item for one in annotations for item in _items(one)]
        else:
            fields = [field for one in models if (field := one.model_fields.get(part))]
            annotations = [field.annotation for field in fields]
        models = [found for one in annotations for found in submodels(one)]
    return {name for one in models for name in one.model_fields} or None


def _items(annotation: Any) -> Iterator[Any]:
    """Yield what a list of this type holds."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is list:
        yield from arguments
    elif origin in (typing.Union, types.UnionType):
        for part in arguments:
            yield from _items(part)


def field_paths(
    model: type[BaseModel], path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], FieldInfo]]:
    """Yield the path and description of every field, those of inner models included."""
    if len(path) >= _MAX_LEVELS:
        return
    for name, info in model.model_fields.items():
        yield (*path, name), info
        for inner in submodels(info.annotation):
            yield from field_paths(inner, (*path, name))


def marked(model: BaseModel, mark: type) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield path and value of each field of a model's values that carries `mark`."""
    for name, info in type(model).model_fields.items():
        value = getattr(model, name)
        if any(isinstance(note, mark) for note in _notes(info)):
            yield (name,), value
        elif isinstance(value, BaseModel):
            for path, inner in marked(value, mark):
                yield (name, *path), inner


def _notes(info: FieldInfo) -> Iterator[Any]:
    """Yield a field's marks, those inside `DataFile | None` included."""
    yield from info.metadata
    yield from _inner_notes(info.annotation)


def _inner_notes(annotation: Any) -> Iterator[Any]:
    origin = typing.get_origin(annotation)
    if origin is Annotated:
        yield from annotation.__metadata__
    elif origin in (typing.Union, types.UnionType):
        for part in typing.get_args(annotation):
            yield from _inner_notes(part)
