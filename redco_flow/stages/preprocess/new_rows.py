"""Rows of a new file, without targets, as the rows that a checkpoint's data section reads.

`redco-flow predict` loads this module by name on a login node. Each row keeps the columns that the
recipe reads and gets a placeholder as its target, so preprocess and predict take it like any other.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from redco_flow.errors import ArtifactError, UnusableRow, UsageError
from redco_flow.recipes.declared import DeclaredRecipe, RowsRecipe, TextRecipe
from redco_flow.recipes.find import find_recipe, find_recipe_if_any
from redco_flow.recipes.parts.images import ImageSettings
from redco_flow.recipes.recipe import CLASSES, NUMBERS
from redco_flow.spec.pipeline import DataSection
from redco_flow.stages.artifacts.dataset import DatasetArtifact
from redco_flow.stages.data.csv_rows import Dialect
from redco_flow.stages.data.image_files import ENDINGS, IMAGE_KEYS, BadImage, read_image_file
from redco_flow.stages.data.row_files import DIALECTS, ending_of, read_file
from redco_flow.stages.data.row_values import AS_TEXT, file_of_image
from redco_flow.stages.data.rows import BadRow, delimiter_hint, problem_of_field, problem_of_text
from redco_flow.stages.preprocess.heads import chat_columns, text_keys
from redco_flow.text.conversations import BadConversation, ChatColumns

_FOLDER = "images"
_NUM_DIGITS = 32

_PLACEHOLDER = "-"
_SHOWN_COLUMNS = 20

Fields = Mapping[str, Any]


def is_image(value: Any) -> bool:
    """Whether a row's value is an image: the bytes of its file, or its path."""
    return isinstance(value, Mapping) and value.keys() == IMAGE_KEYS


def copied_images(
    fields: Mapping[str, Any], column: str | None, folder: Path | None
) -> tuple[Mapping[str, Any], Mapping[str, bytes]]:
    """Return a row that names copies of its images, and the copies' content by path.

    Args:
        column: one that may also have an image file's path as a text.
        folder: the row may only name files below it; None: any file, which the user has named.

    Raises:
        UnusableRow: an image file cannot be read.
    """
    contents: dict[str, bytes] = {}

    def copied(value: Any, key: str) -> Any:
        if key == column and isinstance(value, str):
            value = {"bytes": None, "path": value}
        if is_image(value):
            content = _content(value, key, folder)
            name = f"{_FOLDER}/{sha256(content).hexdigest()[:_NUM_DIGITS]}{_ending(value['path'])}"
            contents[name] = content
            return {"bytes": None, "path": name}
        if isinstance(value, Mapping):
            return {name: copied(one, "") for name, one in value.items()}
        if isinstance(value, list | tuple):
            return [copied(one, "") for one in value]
        return value

    return {key: copied(value, key) for key, value in fields.items()}, contents


def _content(image: Mapping[str, Any], key: str, folder: Path | None) -> bytes:
    content, path = image["bytes"], image["path"]
    try:
        if content is None:
            return read_image_file(str(path), None if folder is None else [folder])
        return bytes(memoryview(content))
    except (BadImage, TypeError) as error:
        reason = f"field '{key}' is no image that can be read"
        raise UnusableRow(reason, f"{path}: {error}") from error


def _ending(path: Any) -> str:
    ending = Path(str(path or "")).suffix.lower()
    return ending if ending[1:].isascii() and ending[1:].isalnum() else ""


@dataclass(frozen=True)
class NewRow:
    """One row of the user's.

    Args:
        fields: its columns; empty where the row cannot be read.
        usable: the row to preprocess, as a line of JSON; empty where there is a problem.
        problem: why the row gets no prediction.
        images: contents of the image files that `usable` names, by path relative to its file.
    """

    fields: Fields
    usable: str = ""
    problem: str = ""
    images: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class NewRows:
    """Reads new files for one checkpoint.

    Args:
        needed: the columns that each row must have.
        data: keys of the pipeline's data section for the usable rows.
        preprocess, predict: keys of the stages.
        makes_texts: whether predicting generates texts.
        has_tokenizer: whether the checkpoint has one, which preprocessing then takes.
        image: the recipe's and the data's name of the column that may name an image file; None
            of a recipe without images.
        renaming: for each needed column the setting that gives it another name.
        compares: whether predicting needs a reference's scores.
    """

    needed: tuple[str, ...]
    data: Mapping[str, Any]
    preprocess: Mapping[str, Any]
    predict: Mapping[str, Any]
    _dialect: Dialect
    _usable: Callable[[Fields], Fields]
    _value_of_text: Callable[[str], Any] = str
    makes_texts: bool = False
    has_tokenizer: bool = True
    image: tuple[str, str] | None = None
    renaming: Mapping[str, str] = field(default_factory=dict)
    compares: bool = False

    def row_of_text(self, text: str) -> dict[str, Any]:
        """Return the row with a line of plain text as its input, or with the path of an image.

        Raises:
            UsageError: the recipe takes rows as they are.
        """
        if not self.needed:
            raise UsageError("standard input: the checkpoint's recipe takes rows: give JSON lines.")
        return {self.needed[0]: self._value_of_text(text)}

    def read(self, path: Path, image_folder: Path | None = None) -> Iterator[NewRow]:
        """Yield a file's rows, in order.

        Args:
            image_folder: where image files that rows name may be; None: the file's own.

        Raises:
            UsageError: the file cannot be read, has no rows, or no row has the needed columns.
        """
        if self.image is not None and path.suffix.lower() in ENDINGS:
            yield self._row({self.image[1]: str(path)}, None)
            return
        found: dict[str, None] = {}
        num_rows, fits = 0, False
        dialect = self._dialect if ending_of(path) in DIALECTS else Dialect()
        try:
            for row in read_file(path, dialect):
                num_rows += 1
                if isinstance(row, BadRow):
                    yield NewRow({}, problem=f"{row.reason}: {row.detail}".removesuffix(": "))
                    continue
                found |= dict.fromkeys(map(str, row.fields))
                fits = fits or all(key in row.fields for key in self.needed)
                yield self._row(row.fields, image_folder or path.parent)
        except FileNotFoundError as error:
            raise UsageError(f"{path}: there is no such file.") from error
        except (ValueError, OSError) as error:
            text = str(error)
            raise UsageError(text if str(path) in text else f"{path}: {text}") from error
        if not num_rows:
            raise UsageError(f"{path}: there are no rows in it.")
        if found and not fits:
            raise UsageError(self._misfit(path, list(found)))

    def _row(self, fields: Fields, folder: Path | None) -> NewRow:
        """Return a row; the image files that it names are below `folder`, or None: anywhere."""
        shown = {key: value["path"] if is_image(value) else value for key, value in fields.items()}
        try:
            column = self.image[0] if self.image is not None else None
            usable, images = copied_images(self._usable(fields), column, folder)
            return NewRow(shown, json.dumps(usable, default=_json_value), images=images)
        except UnusableRow as error:
            return NewRow(shown, problem=f"{error.reason}: {error.detail}".removesuffix(": "))

    def _misfit(self, path: Path, found: Sequence[str]) -> str:
        missing = next(key for key in self.needed if key not in found)
        renaming = self.renaming.get(missing, "data.source_key")
        more = ", …" if len(found) > _SHOWN_COLUMNS else ""
        hint = delimiter_hint(found[0]) if len(found) == 1 else ""
        return (
            f"{path}: the checkpoint reads the column{'s' * (len(self.needed) > 1)} "
            f"{', '.join(self.needed)}, and the file has {', '.join(found[:_SHOWN_COLUMNS])}{more}"
            f"{hint}. Rename the column, or name it, as {renaming}=COLUMN."
        )


def first_row(path: Path) -> Fields:
    """Return the first row of a file; empty of an image, or where it cannot be read."""
    if path.suffix.lower() in ENDINGS:
        return {}
    with suppress(ValueError, OSError):
        found = (row for row in read_file(path) if not isinstance(row, BadRow))
        for row in found:
            return row.fields
    return {}


def as_prompts(
    settings: Mapping[str, Any], dataset: Path, row: Fields
) -> tuple[dict[str, Any], int] | None:
    """Return settings by which a model that learnt preferences answers prompts, and the length.

    The lengths share what a prompt with an answer had in training.

    Args:
        settings, dataset: as of `new_rows`.
        row: the first of the new rows; empty of plain texts.

    Returns:
        None where the row has both answers, which are compared, or the recipe is another one.
    """
    recipe = find_recipe_if_any(settings["recipe"])
    if not isinstance(recipe, RowsRecipe) or not recipe.takes_messages:
        return None
    data, own = settings["data"], recipe.last_argument(settings.get("settings") or {})
    renamed = data.get("columns") or {}
    prompt, *answers = [renamed.get(name, name) for name in recipe.columns or ()]
    if all(name in row for name in answers):
        return None
    half = max(2, own[0].max_length // 2)
    kept = {name: data[name] for name in ("csv", *_AROUND, *_OF_TEMPLATE) if data.get(name)}
    try:
        trained = DatasetArtifact(dataset).split("train")
    except (OSError, ArtifactError) as error:
        raise UsageError(
            "the training's dataset, which shows whether prompts are texts or messages, was "
            f"deleted: run its pipeline again, which makes it again. {error}"
        ) from error
    if not len(trained) or isinstance(trained[0]["chosen"], str):
        lengths = {"max_source_length": half, "max_target_length": half}
        reads = {"recipe": "language_modeling", "truncation_side": "left"}
        return {**reads, **lengths, "data": {**kept, "source_key": prompt}}, half
    has_messages = prompt not in row and "messages" in row
    columns = {} if has_messages else {"format": "prompt_completion", "columns": {"prompt": prompt}}
    reads = {"recipe": "chat", "max_length": half, "on_too_long": "error"}
    return {**reads, "data": {**kept, **columns}}, half


def new_rows(
    settings: Mapping[str, Any],
    data: DataSection,
    classes: Sequence[str | int],
    answer_length: int,
    dataset: Path,
) -> NewRows:
    """Return what reads new files for a checkpoint.

    Args:
        settings: of the preprocess stage that made the training's dataset, as plain values.
        data: its data section, without the data.
        classes: the checkpoint's, of a recipe that has some.
        answer_length: the most tokens that a text to be generated has.
        dataset: the training's.

    Raises:
        UsageError: rows of this recipe cannot be made without their targets.
    """
    try:
        recipe = find_recipe(settings["recipe"])
    except ValueError as error:
        raise UsageError(f"{error}. Repeat the command in the directory of its module.") from error
    if isinstance(recipe, RowsRecipe):
        return _of_rows_recipe(recipe, settings, data, classes, dataset)
    assert isinstance(recipe, TextRecipe)
    names = _OF_CHATS if recipe.takes_conversations else _OF_TEXTS
    preprocess = {name: settings[name] for name in names if settings.get(name) is not None}
    predict: dict[str, Any] = {"references": False}
    if recipe.measures_perplexity:
        predict["score_targets"] = False
    if recipe.scores_classes:
        predict["probabilities"] = True
    if recipe.makes_texts:
        predict["max_target_length"] = answer_length
    dialect = Dialect.of(data.csv)
    if recipe.takes_conversations:
        columns = chat_columns(data)
        own = data.columns  # of a checkpoint that learnt preferences
        needed = tuple(own.get(key, key) for key in columns.needed if key not in _ANSWERS)
        keys: dict[str, Any] = {"chat_template_kwargs": data.chat_template_kwargs}
        usable = partial(_asked, columns, own)
        as_value = partial(_message, columns)
        return NewRows(
            needed, keys, preprocess, predict, dialect, usable, as_value, makes_texts=True
        )
    needed = text_keys(data, are_labelled=True)
    keys = {"source_key": needed[0], "target_key": data.target_key}
    if data.text_key is None:
        keys |= {name: one for name in _AROUND if (one := getattr(data, name))}
    else:  # one half of the positions is for the text, the other for what continues it
        half = max(2, int(settings["max_target_length"]) // 2)
        preprocess = {"max_source_length": half, "truncation_side": "left"}
        predict["max_target_length"] = half
    usable = partial(_texts, needed, {data.target_key: _placeholder(recipe, classes)})
    makes_texts = recipe.makes_texts
    return NewRows(needed, keys, preprocess, predict, dialect, usable, makes_texts=makes_texts)


def _of_rows_recipe(
    recipe: RowsRecipe,
    settings: Mapping[str, Any],
    data: DataSection,
    classes: Sequence[str | int],
    dataset: Path,
) -> NewRows:
    inputs = [name for name in recipe.columns or () if name != recipe.target]
    renamed = {name: data.columns.get(name, name) for name in inputs} or data.columns
    target: dict[str, Any] = {}
    if recipe.target is not None:
        is_known = recipe.targets or recipe.target in recipe.text_columns
        found = {recipe.target: _placeholder(recipe, classes)} if is_known else {}
        target = found or _first(dataset, recipe.target)
    predict: dict[str, Any] = {"references": False}
    if recipe.scores_classes:
        predict["probabilities"] = True
    has_images = isinstance(recipe.settings_type, type) and issubclass(
        recipe.settings_type, ImageSettings
    )
    return NewRows(
        needed=tuple(renamed.values()) if inputs else (),
        data={},
        preprocess={},
        predict=predict,
        _dialect=Dialect.of(data.csv),
        _usable=partial(_columns, renamed, target, keeps_all=not inputs),
        makes_texts=recipe.makes_texts,
        has_tokenizer=recipe.has_tokenizer,
        image=(inputs[0], renamed[inputs[0]]) if has_images else None,
        renaming={theirs: f"data.columns.{name}" for name, theirs in renamed.items()},
        compares=recipe.compares(settings.get("settings") or {}),
    )


def _placeholder(recipe: DeclaredRecipe, classes: Sequence[str | int]) -> Any:
    if recipe.targets == CLASSES and not classes:
        raise UsageError("the checkpoint's record does not name its classes.")
    if recipe.targets is None:
        return _PLACEHOLDER
    return 0.0 if recipe.targets == NUMBERS else classes[0]


def _first(dataset: Path, target: str) -> dict[str, Any]:
    """Return the first training row's target, which an unknown recipe can read in any row."""
    rows = DatasetArtifact(dataset).split("train")
    value = rows[0].get(target) if len(rows) else None
    if type(value).__module__.startswith("PIL."):
        value = {"bytes": file_of_image(value), "path": "target.png"}
    return {} if value is None else {target: value}


def _json_value(value: Any) -> Any:
    """Return what JSON has of a value: of arrays lists, of dates and decimal numbers texts."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, AS_TEXT):
        return str(value)
    raise UnusableRow(f"a column has a value of type {type(value).__name__}", "it is not read here")


def _columns(
    renamed: Mapping[str, str], target: Fields, fields: Fields, *, keeps_all: bool
) -> dict[str, Any]:
    """Return the columns by the recipe's names, with a placeholder as the target."""
    if keeps_all:
        own = {theirs: name for name, theirs in renamed.items()}
        return {**{own.get(key, key): value for key, value in fields.items()}, **target}
    for key in renamed.values():
        if problem := problem_of_field(fields, key):
            raise UnusableRow(*problem)
    return {**{name: fields[key] for name, key in renamed.items()}, **target}


_OF_CHATS = ("max_length", "on_too_long")
_OF_TEXTS = ("max_source_length", "truncation_side")
_OF_TEMPLATE = ("chat_template_kwargs", "default_system_message")
_AROUND = ("pair_key", "source_prefix", "source_suffix")
_ANSWERS = ("completion", "output")


def _texts(keys: Sequence[str], target: Fields, fields: Fields) -> dict[str, Any]:
    for key in keys:
        if problem := problem_of_text(fields, key):
            raise UnusableRow(*problem)
    return {**{key: fields[key] for key in keys}, **target}


def _message(columns: ChatColumns, text: str) -> Any:
    if columns.format == "sharegpt":
        return [{"from": "human", "value": text}]
    return [{"role": "user", "content": text}] if columns.format == "messages" else text


def _asked(columns: ChatColumns, renamed: Mapping[str, str], fields: Fields) -> dict[str, Any]:
    """Return the row's conversation, with a placeholder where it does not end with an answer.

    Of one that does, predict generates the last answer again.
    """
    fields = {**fields, **{name: fields[key] for name, key in renamed.items() if key in fields}}
    try:
        chat = columns.read(fields)
    except BadConversation:
        chat = columns.read(_with_answer(columns, fields))
    return {"messages": chat.messages, **({"tools": chat.tools} if chat.tools else {})}


def _with_answer(columns: ChatColumns, fields: Fields) -> Fields:
    answer = {"role": "assistant", "content": _PLACEHOLDER}
    if columns.format == "alpaca":
        return {**fields, "output": _PLACEHOLDER}
    if columns.format == "prompt_completion":
        is_text = isinstance(fields.get("prompt"), str)
        return {**fields, "completion": _PLACEHOLDER if is_text else [answer]}
    key = columns.needed[0]
    turns = fields.get(key)
    if isinstance(turns, str):
        with suppress(ValueError):
            turns = json.loads(turns)
    if not isinstance(turns, list):
        return fields
    own = {"from": "gpt", "value": _PLACEHOLDER} if columns.format == "sharegpt" else answer
    return {**fields, key: [*turns, own]}
