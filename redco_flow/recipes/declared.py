"""A recipe's module, read once into a typed record: of functions, of rows, or of texts.

A module, of this package or a user's, declares one of three kinds by the names that it has:

    FunctionRecipe  init_params(key), collate_fn(examples), loss_fn(params, batch, rngs,
                    is_training), pred_fn(params, batch, rngs); optional: output_fn(arrays)
    RowRecipe       collate_fn(examples), without JAX; build(model) around the pipeline's model
    TextRecipe      encode(sources, targets, tokenizer, …), used by preprocessing;
                    build(model, tokenizer, *, source_length, target_length)

Optional of all: `Settings`, a dataclass or pydantic model of the keys of `settings` in YAML, which
each function (of texts `build` alone) then takes as its last argument; TARGETS; FAMILIES and
DEFAULT_FAMILY; SAME_MODEL_AS; `needs_reference`. The records below describe the other names.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from types import ModuleType
from typing import Any, ClassVar

from redco_flow.recipes.recipe import CLASSES, NUMBERS, Collate, Example, Recipe, TokenLengths
from redco_flow.spec.recipe_settings import SETTINGS, read_settings, settings_model

DEFAULT_MAX_LENGTH = 2048
"""Tokens of a whole conversation at most, where the pipeline gives no `max_length`."""


@dataclass(frozen=True, kw_only=True)
class DeclaredRecipe(ABC):
    """The declarations that recipes of all kinds share.

    Args:
        name: as it is in YAML.
        module: its dotted name.
        preprocessing_module: the module that encodes or checks rows: the model behind a recipe
            makes no difference to a dataset.
        settings_type: `Settings`.
        targets: TARGETS: "classes", whose names the settings get as `classes` where the pipeline
            gives none, or "numbers"; None: texts, or whatever there is.
        families, default_family: FAMILIES, DEFAULT_FAMILY: the model families that it trains (None:
            any), and which one where the pipeline names none.
        same_model_as: SAME_MODEL_AS: a recipe whose checkpoints this one reads, and which reads
            those of this one; by default its own name.
        can_pack: CAN_PACK: whether several examples can share a row (`Recipe.collate_packed`).
        scores_classes: SCORES_CLASSES: whether the recipe has `Recipe.class_scores`.
        measures_perplexity: MEASURES_PERPLEXITY: whether `perplexity` is next to `eval_loss`.
        needs_reference: (settings) -> whether examples need a reference's scores
            (`reference_scores`); optional.
        has_ids: whether examples have token ids.
        has_tokenizer: whether datasets have a tokenizer.
        makes_texts: whether the model generates texts.
        takes_conversations: TAKES_CONVERSATIONS: whether rows are conversations (`data.format`).
        takes_messages: TAKES_MESSAGES: whether text columns of rows may hold messages.
    """

    is_of_rows: ClassVar[bool] = True
    """Whether preprocessing keeps rows as they are."""
    has_own_model: ClassVar[bool] = False
    """Whether the recipe brings its model, so that the pipeline chooses none."""

    name: str
    module: str
    preprocessing_module: str
    settings_type: type | None
    same_model_as: str
    has_ids: bool
    has_tokenizer: bool
    makes_texts: bool
    targets: str | None = None
    families: tuple[str, ...] | None = None
    default_family: str | None = None
    can_pack: bool = False
    scores_classes: bool = False
    measures_perplexity: bool = False
    takes_conversations: bool = False
    takes_messages: bool = False
    needs_reference: Callable[[Any], bool] | None = None

    @abstractmethod
    def make(self, model: Mapping[str, Any], texts: TokenLengths | None) -> Recipe:
        """Make the recipe around a model.

        Args:
            model: the keys of a pipeline's `model` section, with `settings` where the recipe has
                some; or the `Recipe.model` of a checkpoint.
            texts: the dataset's tokenizer and lengths; None of rows without any.

        Raises:
            ValueError: the model fits neither the recipe, the tokenizer nor such lengths.
        """

    def last_argument(self, settings: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return the settings as a function's last argument; empty where the recipe has none.

        Args:
            settings: as they are in YAML.
        """
        if self.settings_type is None:
            return ()
        return (read_settings(self.settings_type, settings),)

    def compares(self, settings: Mapping[str, Any]) -> bool:
        """Whether examples need a reference's scores; False of settings that cannot be read."""
        try:
            return self.needs_reference is not None and bool(
                self.needs_reference(*self.last_argument(settings))
            )
        except ValueError:  # is reported where the settings are checked
            return False


@dataclass(frozen=True, kw_only=True)
class TextRecipe(DeclaredRecipe):
    """A recipe whose texts become token ids in preprocessing.

    Args:
        encode: (sources, targets, tokenizer, *, source_prefix, source_suffix, max_source_length,
            max_target_length) -> `EncodedPairs`; with `truncation_side` too where the pipeline can
            choose which end of a source is cut off. Where `targets` are labels it gets none. Of
            conversations: (chats, template, *, train_on, max_length, on_too_long).
        build: (model, tokenizer, *, source_length, target_length) -> `Recipe`.
        encode_texts: (texts, tokenizer, *, max_length) -> `EncodedPairs`: plain texts; optional.
        takes_pairs: TAKES_PAIRS: whether a source may be two texts (`data.pair_key`), joined by
            `PAIR_SEPARATOR`.
    """

    is_of_rows: ClassVar[bool] = False

    encode: Callable[..., Any]
    build: Callable[..., Recipe]
    encode_texts: Callable[..., Any] | None = None
    takes_pairs: bool = False

    @property
    def cuts_either_end(self) -> bool:
        """Whether the pipeline can choose which end of a source is cut off."""
        return "truncation_side" in inspect.signature(self.encode).parameters

    def make(self, model: Mapping[str, Any], texts: TokenLengths | None) -> Recipe:
        """Make the recipe around a model; see `DeclaredRecipe`."""
        if texts is None:
            raise _rows_alone(self)
        own = dict(zip(("settings",), self.last_argument(_settings_of(model)), strict=False))
        lengths = {"source_length": texts.source_length, "target_length": texts.target_length}
        return self.build(model, texts.tokenizer, **lengths, **own)


@dataclass(frozen=True, kw_only=True)
class RowsRecipe(DeclaredRecipe):
    """A recipe that takes rows as they are.

    Args:
        collate_fn: (examples) -> arrays; preprocessing checks rows by it, so without JAX.
        columns: COLUMNS: the columns that it reads; None: whatever there is.
        target: TARGET: the column that predictions are compared with, `label` by default; None: no
            column is.
        split_by: SPLIT_BY: columns whose hash decides which rows are held out; none: all.
        split_key: (example) -> bytes whose hash does so instead; optional.
        text_columns: TEXT_COLUMNS: columns with texts; the dataset then has a tokenizer.
        is_truncated: (row, tokenizer, settings) -> whether such a text is longer than what is read
            of it; preprocessing counts those rows; optional.
        encode_row: (row, tokenizer, settings, *, source_prefix, source_suffix) -> token ids by
            column, kept next to the row: `source_ids` of the prompt, others of answers; it raises
            `BadExample` for a row that cannot be used; with `takes_messages` it gets `template`,
            () -> `ChatTemplate`; optional.
        conversations: (row) -> the `Conversation`s that the template renders, for a plan to try.
    """

    collate_fn: Callable[..., Any]
    target: str | None
    columns: tuple[str, ...] | None = None
    split_by: tuple[str, ...] = ()
    split_key: Callable[[Example], bytes] | None = None
    text_columns: tuple[str, ...] = ()
    is_truncated: Callable[..., bool] | None = None
    encode_row: Callable[..., Mapping[str, Sequence[int]]] | None = None
    conversations: Callable[[Mapping[str, Any]], Sequence[Any]] | None = None

    def collate_with(self, settings: Mapping[str, Any]) -> Collate:
        """Return `collate_fn` bound to settings as they are in YAML; no model is made for it."""
        last = self.last_argument(settings)
        return lambda examples: self.collate_fn(examples, *last)


@dataclass(frozen=True, kw_only=True)
class RowRecipe(RowsRecipe):
    """A recipe of rows around the model that the pipeline's `model` section names.

    Args:
        build: (model) -> `Recipe`; with `text_columns` (model, tokenizer); with `encode_row`
            (model, texts), which are `TokenLengths` of both together.
    """

    build: Callable[..., Recipe]

    def make(self, model: Mapping[str, Any], texts: TokenLengths | None) -> Recipe:
        """Make the recipe around a model; see `DeclaredRecipe`."""
        own = dict(zip(("settings",), self.last_argument(_settings_of(model)), strict=False))
        if not self.has_tokenizer:
            return self.build(model, **own)
        if texts is None:
            raise _rows_alone(self)
        return self.build(model, texts if self.has_ids else texts.tokenizer, **own)


@dataclass(frozen=True, kw_only=True)
class FunctionRecipe(RowsRecipe):
    """A recipe of rows that brings its own model.

    Args:
        init_params: (key) -> parameters.
        loss_fn: (params, batch, rngs, is_training) -> a scalar, or (totals (B,), weights (B,)).
        pred_fn: (params, batch, rngs) -> arrays (B, ...).
        output_fn: those arrays -> a JSON value per row.
    """

    has_own_model: ClassVar[bool] = True

    init_params: Callable[..., Any]
    loss_fn: Callable[..., Any]
    pred_fn: Callable[..., Any]
    output_fn: Callable[..., Sequence[Any]] | None = None

    def make(self, model: Mapping[str, Any], texts: TokenLengths | None = None) -> Recipe:
        """Bind the functions to the settings; see `DeclaredRecipe`."""
        # Plans read recipes, and need no NumPy.
        from redco_flow.recipes.parts.outputs import as_json, rows_of

        settings = _settings_of(model)
        last = self.last_argument(settings)

        def bound(function: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *arguments: function(*arguments, *last)

        def abstract_params() -> Any:
            import jax

            return jax.eval_shape(init_params, jax.random.key(0))

        init_params, pred_fn = bound(self.init_params), bound(self.pred_fn)
        to_outputs = rows_of if self.output_fn is None else bound(self.output_fn)
        return Recipe(
            model={"settings": dict(settings)} if last else {},
            init_params=init_params,
            abstract_params=abstract_params,
            collate_fn=bound(self.collate_fn),
            loss_fn=bound(self.loss_fn),
            make_pred_fn=lambda _generation: pred_fn,
            output_fn=lambda found: [as_json(row) for row in to_outputs(found)],
        )


def _settings_of(model: Mapping[str, Any]) -> Mapping[str, Any]:
    return model.get("settings") or {}


def _rows_alone(recipe: DeclaredRecipe) -> ValueError:
    return ValueError(f"recipe '{recipe.name}' is of texts, and the dataset has rows alone.")


@cache
def read_recipe(name: str, module: ModuleType) -> DeclaredRecipe:
    """Read what a module declares.

    Raises:
        ValueError: the module is not a recipe; the message begins with what it lacks or has.
    """
    of_texts = [hasattr(module, function) for function in ("encode", "build")]
    recipe: DeclaredRecipe
    if of_texts[0] or (of_texts[1] and not hasattr(module, "collate_fn")):
        recipe = _text_recipe(name, module)
    else:
        recipe = _rows_recipe(name, module)
    if problem := _problem_of_targets(recipe):
        raise ValueError(problem)
    return recipe


def _values(kind: type[DeclaredRecipe], module: ModuleType) -> dict[str, Any]:
    """Return what a module has of a record's fields: constants in upper case, functions as named.

    Fields without a default are computed, or are functions that were checked.
    """
    values: dict[str, Any] = {}
    for field in fields(kind):
        is_function = "Callable[" in str(field.type)
        value = getattr(module, field.name if is_function else field.name.upper(), None)
        if value is not None:
            values[field.name] = tuple(value) if isinstance(value, list) else value
    return values


def _common(name: str, module: ModuleType) -> dict[str, Any]:
    return {
        "name": name,
        "module": module.__name__,
        "settings_type": getattr(module, SETTINGS, None),
        "same_model_as": str(getattr(module, "SAME_MODEL_AS", name)),
    }


def _text_recipe(name: str, module: ModuleType) -> TextRecipe:
    missing = [function for function in ("encode", "build") if not hasattr(module, function)]
    if missing:
        raise ValueError(f"lacks {' and '.join(missing)}.")
    values = _values(TextRecipe, module) | _common(name, module)
    values |= {"has_ids": True, "has_tokenizer": True, "makes_texts": "targets" not in values}
    return TextRecipe(**values, preprocessing_module=str(module.encode.__module__))


def _rows_recipe(name: str, module: ModuleType) -> RowsRecipe:
    has_texts = bool(getattr(module, "TEXT_COLUMNS", ()))
    _check_functions(module, has_texts=has_texts)
    kind = RowRecipe if hasattr(module, "build") else FunctionRecipe
    values = _values(kind, module) | _common(name, module)
    has_ids = "encode_row" in values
    values |= {"has_ids": has_ids, "has_tokenizer": has_texts}
    values |= {"makes_texts": has_texts and not has_ids}
    columns = values.get("columns")
    default = "label" if columns is None or "label" in columns else None
    own = module.__name__ if kind is FunctionRecipe else str(module.collate_fn.__module__)
    values |= {"target": getattr(module, "TARGET", default), "preprocessing_module": own}
    return kind(**values)


def _problem_of_targets(recipe: DeclaredRecipe) -> str | None:
    """Say that TARGETS have an unknown value, or that the settings cannot get the classes."""
    targets = recipe.targets
    if targets not in (None, CLASSES, NUMBERS):
        return f"has TARGETS {targets!r}; they are {CLASSES!r} or {NUMBERS!r}."
    if targets and isinstance(recipe, RowsRecipe) and recipe.target is None:
        return f"has TARGETS {targets!r} and no TARGET: say which of its COLUMNS holds them."
    if recipe.scores_classes and isinstance(recipe, FunctionRecipe):
        return "has SCORES_CLASSES, which is of recipes with `build`: they return `class_scores`."
    own = recipe.settings_type
    if targets == CLASSES and (own is None or CLASSES not in settings_model(own).model_fields):
        return (
            f"has TARGETS {targets!r}, whose names its {SETTINGS} get: give that a field "
            f"'{CLASSES}: list[str | int]', empty by default."
        )
    return None


_NUM_ARGUMENTS: Mapping[str, int] = {
    "init_params": 1,
    "collate_fn": 1,
    "loss_fn": 4,
    "pred_fn": 3,
}
"""The functions of a recipe with its own model, and their arguments without the settings."""


def _check_functions(module: ModuleType, *, has_texts: bool) -> None:
    """Refuse a module that is no recipe of rows."""
    needed = _NUM_ARGUMENTS
    if hasattr(module, "build"):
        needed = {"collate_fn": 1, "build": 1 + has_texts}
    missing = [name for name in needed if not callable(getattr(module, name, None))]
    if missing:
        raise ValueError(
            f"lacks {', '.join(missing)}: a recipe has {', '.join(_NUM_ARGUMENTS)}, or encode and "
            "build where texts are encoded ahead of time."
        )
    num_more = int(hasattr(module, SETTINGS))
    for name, count in {**needed, "output_fn": 1}.items():
        function = getattr(module, name, None)
        if function is not None and not _takes(function, count + num_more):
            last = f", the last of which are the {SETTINGS}" if num_more else ""
            raise ValueError(
                f"has a {name} that cannot be called with {count + num_more} arguments{last}."
            )
    columns, target = getattr(module, "COLUMNS", None), getattr(module, "TARGET", None)
    if columns is not None and not (
        isinstance(columns, tuple | list) and all(isinstance(one, str) for one in columns)
    ):
        raise ValueError(f"has COLUMNS that are no tuple of names: {columns!r}.")
    if target is not None and not (isinstance(target, str) and target in (columns or (target,))):
        raise ValueError(f"has a TARGET that is none of its COLUMNS: {target!r}.")


def _takes(function: Callable[..., Any], count: int) -> bool:
    try:
        inspect.signature(function).bind(*range(count))
    except (TypeError, ValueError):
        return False
    return True
