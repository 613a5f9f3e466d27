"""The strict base of every configuration model, and the field types that they share.

Strict means: unknown keys are errors, nothing is coerced ("4" is no number, `no` is no boolean),
and a value never changes after it was read. Knows no files and no positions.
"""

from __future__ import annotations

import inspect
import json
import re
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    StringConstraints,
)
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema

from redco_flow.local_paths import expanded

# `name, other: what they say`, and lines that are indented further.
_ARGUMENT = re.compile(r"^ {4}(\w+(?:, \w+)*): (.*(?:\n {8}.*)*)", re.MULTILINE)
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$"
OF_RECORD = "record"
"""The context in which a run's record is validated; it may have what users' files may not."""


class StrictModel(BaseModel):
    """A frozen model that refuses unknown keys and coerces nothing.

    Write sequences as `list[...]`: a `tuple[...]` field takes JSON through `from_json` only.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        validate_default=True,
        protected_namespaces=(),
    )

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """Describe each property by the class's docstring: editors and the reference show it."""
        schema = handler(core_schema)
        properties = handler.resolve_ref_schema(schema).get("properties", {})
        for name, text in described_fields(cls).items():
            properties[name].setdefault("description", text)
        return schema

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Validate plain JSON values (the inverse of `model_dump(mode="json")`).

        Raises:
            pydantic.ValidationError: every mistake, with its place.
        """
        return cls.model_validate_json(json.dumps(values))


def described_fields(model: type[BaseModel]) -> dict[str, str]:
    """Return what the docstrings of a model and of its bases say of each field."""
    found: dict[str, str] = {}
    for base in reversed(model.__mro__):
        _, _, listed = inspect.cleandoc(base.__doc__ or "").partition("Args:\n")
        for names, text in _ARGUMENT.findall(listed):
            found |= dict.fromkeys(names.split(", "), " ".join(text.split()))
    return {name: text for name, text in found.items() if name in model.model_fields}


@dataclass(frozen=True)
class Placement:
    """Marks a field that says where or how fast, never what: it stays out of `settings`.

    A changed number of workers, shards or hosts must not make a stage run again:
    `num_workers: Annotated[PositiveInt, Placement()] = 1`.
    """


@dataclass(frozen=True)
class OfTraining:
    """Marks a field of a recipe's `Settings` that says nothing of rows.

    It stays out of the `settings` of stages that make rows ready, which then need not run again
    for each point of a sweep over it.
    """


@dataclass(frozen=True)
class OnlyWhereSet:
    """Marks a field that is no part of `settings` while it is 0, false, empty or None.

    A setting that a new version adds and that changes nothing by default must not make stages run
    again.
    """


@dataclass(frozen=True)
class ContentOf:
    """Marks a path whose file is digested: `settings` keep its file name, not its directory."""


class ContentOfFolder(ContentOf):
    """Marks the path of a folder all of whose files are digested."""


class ContentOrName(ContentOf):
    """Marks a path whose file is digested, where there may be a name instead, without a '/'."""


@dataclass(frozen=True)
class InWorkspace:
    """Marks a relative path below the workspace that a stage writes to."""


def _one_line(text: str) -> str:
    if not text.isprintable():
        raise ValueError("must be one line without control characters")
    return text


def _absolute(text: str) -> str:
    return str(expanded(text).absolute())


def absolute_template(text: str | None) -> str | None:
    """Return a chat template's file, made absolute; a template's name as it is."""
    return _absolute(text) if text is not None and text.endswith(".jinja") else text


def _below(text: str) -> str:
    path = PurePosixPath(text)
    if path.is_absolute() or ".." in path.parts or text.startswith("~") or not path.parts:
        raise ValueError("must be a relative path that stays inside the workspace, without '..'")
    return text


def _revision(text: str) -> str:
    # What git allows in a name, as far as the hub does; it is a part of addresses and of paths.
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_./+@#-]{0,199}", text) or ".." in text:
        raise ValueError("must be a branch, a tag or a commit of the repository on the hub")
    return text


def checked_regex(text: str) -> str:
    """Return a regex that compiles; else raise ValueError."""
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"{text!r} is not a regex: {error}") from error
    return text


def _number_as_text(value: Any) -> Any:
    return str(value) if type(value) is int else value


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Name = Annotated[str, StringConstraints(pattern=NAME_PATTERN)]
"""A name of a pipeline, a stage or a tag: it becomes a directory's name."""

Text = Annotated[str, StringConstraints(min_length=1)]
Line = Annotated[Text, AfterValidator(_one_line)]
Regex = Annotated[Text, AfterValidator(checked_regex)]
Texts = Annotated[list[Text], BeforeValidator(_as_list, json_schema_input_type=Text | list[Text])]
"""Texts; one alone needs no brackets: `metrics: bleu`."""

Names = Annotated[list[Name], BeforeValidator(_as_list, json_schema_input_type=Name | list[Name])]
"""Names, or one alone."""


PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Revision = Annotated[str, AfterValidator(_revision)]
"""A branch, tag or commit of a repository on the hub."""

VariableName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
"""An environment variable's name."""

Scalar = bool | int | float | str | None

EnvironmentValue = Annotated[str, BeforeValidator(_number_as_text)]
"""An environment variable's value; `OMP_NUM_THREADS: 4` needs no quotes."""

DataFile = Annotated[Text, AfterValidator(_absolute), ContentOf()]
"""A file that is read, made absolute against the current directory."""

DataFiles = DataFile | Annotated[list[DataFile], Field(min_length=1)]
"""A file that is read, or several, one after the other."""

DataFolder = Annotated[Text, AfterValidator(_absolute), ContentOfFolder()]
"""A folder whose files are read, made absolute against the current directory."""

OutputPath = Annotated[Text, AfterValidator(_below), InWorkspace()]
"""A path that is written, relative to the workspace; it may not lead out of it."""

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
        fields = [field for one in models if (field := one.model_fields.get(str(part)))]
        inner = [item for one in annotations for item in _items(one)]
        annotations = [field.annotation for field in fields] or inner
        models = [found for one in annotations for found in submodels(one)]
    return {name for one in models for name in one.model_fields} or None


def _items(annotation: Any) -> Iterator[Any]:
    """Yield what a list of this type holds, or a mapping's values are."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (list, dict):
        yield arguments[-1]
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
    """Yield a field's marks, those inside `DataFile | None` and `list[DataFile]` included."""
    yield from info.metadata
    yield from _inner_notes(info.annotation)


def _inner_notes(annotation: Any) -> Iterator[Any]:
    origin = typing.get_origin(annotation)
    if origin is Annotated:
        yield from annotation.__metadata__
        yield from _inner_notes(annotation.__origin__)
    elif origin in (typing.Union, types.UnionType):
        for part in typing.get_args(annotation):
            yield from _inner_notes(part)
    elif origin in (list, dict):
        item = typing.get_args(annotation)[-1]
        if typing.get_origin(item) is Annotated:
            yield from item.__metadata__
