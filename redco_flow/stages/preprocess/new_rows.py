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
from pathlib import Path
from typing import Any

from redco_flow.errors import UnusableRow, UsageError
from redco_flow.recipes.declared import DeclaredRecipe, RowsRecipe, TextRecipe
from redco_flow.recipes.find import find_recipe
from redco_flow.recipes.parts.images import ImageSettings
from redco_flow.recipes.recipe import CLASSES, NUMBERS
from redco_flow.spec.pipeline import DataSection
from redco_flow.stages.artifacts.dataset import DatasetArtifact
from redco_flow.stages.data.csv_rows import Dialect
from redco_flow.stages.data.image_folder import ENDINGS
from redco_flow.stages.data.row_files import DIALECTS, ending_of, read_file
from redco_flow.stages.data.row_values import as_json_value
from redco_flow.stages.data.rows import BadRow, delimiter_hint, problem_of_field, problem_of_text
from redco_flow.stages.preprocess.heads import chat_columns, text_keys
from redco_flow.stages.preprocess.new_images import copied_images, is_image
from redco_flow.text.conversations import BadConversation, ChatColumns

_PLACEHOLDER = "-"
_SHOWN_COLUMNS = 20

Fields = Mapping[str, Any]


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
        has_tokenizer: whether the checkpoint has one, which preprocessing then takes.
        image_column: a column that may name an image file; None: of a recipe without images.
    """

    needed: tuple[str, ...]
    data: Mapping[str, Any]
    preprocess: Mapping[str, Any]
    predict: Mapping[str, Any]
    _dialect: Dialect
    _usable: Callable[[Fields], Fields]
    _value_of_text: Callable[[str], Any] = str
    has_tokenizer: bool = True
    image_column: str | None = None

    def row_of_text(self, text: str) -> dict[str, Any]:
        """Return the row with a line of plain text as its input.

        Raises:
            UsageError: the recipe reads several columns, or an image.
        """
        if not self.has_tokenizer or self.image_column or not self.needed:
            raise UsageError("standard input: a plain text is not what the checkpoint reads.")
        return {self.needed[0]: self._value_of_text(text)}

    def read(self, path: Path) -> Iterator[NewRow]:
        """Yield a file's rows, in order.

        Raises:
            UsageError: the file cannot be read, has no rows, or no row has the needed columns.
        """
        if self.image_column and path.suffix.lower() in ENDINGS:
            yield self._row({self.image_column: str(path)}, None)
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
                yield self._row(row.fields, path.parent)
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
            usable, images = copied_images(fields, self.image_column, folder)
            return NewRow(shown, json.dumps(self._usable(usable), default=str), images=images)
        except UnusableRow as error:
            return NewRow(shown, problem=f"{error.reason}: {error.detail}".removesuffix(": "))

    @property
    def _renaming(self) -> str:
        return "data.source_key=COLUMN" if self.data else f"data.columns.{self.needed[0]}=COLUMN"

    def _misfit(self, path: Path, found: Sequence[str]) -> str:
        more = ", …" if len(found) > _SHOWN_COLUMNS else ""
        hint = delimiter_hint(found[0]) if len(found) == 1 else ""
        return (
            f"{path}: the checkpoint reads the column{'s' * (len(self.needed) > 1)} "
            f"{', '.join(self.needed)}, and the file has {', '.join(found[:_SHOWN_COLUMNS])}{more}"
            f"{hint}. Rename the column, or name it, as {self._renaming}."
        )


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
    recipe = find_recipe(settings["recipe"])
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
        needed = tuple(key for key in columns.needed if key not in _ANSWERS)
        keys: dict[str, Any] = {"chat_template_kwargs": data.chat_template_kwargs}
        usable = partial(_asked, columns)
        as_value = partial(_message, columns)
        return NewRows(needed, keys, preprocess, predict, dialect, usable, as_value)
    needed = text_keys(data, are_labelled=True)
    keys = {"source_key": needed[0], "target_key": data.target_key}
    if data.text_key is None:
        keys |= {name: one for name in _AROUND if (one := getattr(data, name))}
    else:  # one half of the positions is for the text, the other for what continues it
        half = max(2, int(settings["max_target_length"]) // 2)
        preprocess = {"max_source_length": half, "truncation_side": "left"}
        predict["max_target_length"] = half
    usable = partial(_texts, needed, {data.target_key: _placeholder(recipe, classes)})
    return NewRows(needed, keys, preprocess, predict, dialect, usable)


def _of_rows_recipe(
    recipe: RowsRecipe,
    settings: Mapping[str, Any],
    data: DataSection,
    classes: Sequence[str | int],
    dataset: Path,
) -> NewRows:
    own = settings.get("settings") or {}
    if recipe.compares(own):
        raise UsageError(
            f"recipe '{recipe.name}' predicts by a reference's scores, which a new file does not "
            "have. Use a pipeline with a predict stage; its `checkpoint` may be this one's id."
        )
    inputs = [name for name in recipe.columns or () if name != recipe.target]
    renamed = {name: data.columns.get(name, name) for name in inputs} or data.columns
    target = {}
    if recipe.target is not None:
        is_known = recipe.targets or recipe.target in recipe.text_columns
        value = _placeholder(recipe, classes) if is_known else _first(dataset, recipe.target)
        target = {} if value is None else {recipe.target: value}
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
        has_tokenizer=recipe.has_tokenizer,
        image_column=renamed[inputs[0]] if has_images else None,
    )


def _placeholder(recipe: DeclaredRecipe, classes: Sequence[str | int]) -> Any:
    if recipe.targets == CLASSES and not classes:
        raise UsageError("the checkpoint's record does not name its classes.")
    if recipe.targets is None:
        return _PLACEHOLDER
    return 0.0 if recipe.targets == NUMBERS else classes[0]


def _first(dataset: Path, target: str) -> Any:
    """Return the first training row's target, which an unknown recipe can read in any row."""
    rows = DatasetArtifact(dataset).split("train")
    return as_json_value(rows[0].get(target)) if len(rows) else None


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


def _asked(columns: ChatColumns, fields: Fields) -> dict[str, Any]:
    """Return the row's conversation, with a placeholder where it does not end with an answer.

    Of one that does, predict generates the last answer again.
    """
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
