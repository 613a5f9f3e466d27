"""What a recipe is, and how one is found by the name that stands in YAML.

A recipe is one module: of this package, any importable dotted one, or `python:NAME`. It has the
three functions and says how parameters begin:

    init_params(key) -> parameters
    collate_fn(examples) -> arrays
    loss_fn(params, batch, rngs, is_training) -> scalar, or (totals (B,), weights (B,))
    pred_fn(params, batch, rngs) -> arrays (B, ...)
    output_fn(arrays) -> a JSON value per row; optional
    Settings: a dataclass or pydantic model of keys that YAML has under `settings`; optional, and
        where it is there, each function takes the settings as its last argument
    COLUMNS: names of the columns that it reads; optional
    TARGET: which of them predictions are compared with; optional: `label`
    TARGETS: what stands in that column where a recipe says so: "classes", whose names the settings
        get as `classes` where the pipeline gives none, or "numbers"

or, around a model that the pipeline's `model` names, instead of those functions:

    build(model) -> Recipe; with `settings` too where the module has `Settings`
    collate_fn(examples) -> arrays: all that preprocessing needs of it, so import no JAX for it
    FAMILIES, DEFAULT_FAMILY: the model families that it trains, and which where nothing says it
    TEXT_COLUMNS: columns whose texts the model writes; the dataset then has a tokenizer, and
        `build(model, tokenizer)` gets it
    is_truncated(row, tokenizer, settings) -> whether such a text is longer than what is read of it;
        optional, beside TEXT_COLUMNS: preprocessing counts those rows

    encode_row(row, tokenizer, settings, *, source_prefix, source_suffix) -> token ids by column;
        beside TEXT_COLUMNS, used by preprocessing: they are kept beside the row, `source_ids` those
        of what is asked, others of what is answered. `build(model, texts)` then gets how long both
        are together, as `TokenLengths`; what cannot be used raises `BadExample`
    TAKES_MESSAGES: whether those columns may hold messages; `encode_row` gets `template` then,
        () -> ChatTemplate, and
        conversations(row) -> the `Conversation`s that the template renders, so that a plan can try
    SPLIT_BY: columns whose hash decides which rows are held out; optional: all
    split_key(example) -> bytes whose hash does so, instead
    needs_reference(settings) -> whether examples need scores of a reference (`reference_scores`)
    SAME_MODEL_AS: a recipe whose checkpoints it begins with, and which reads its own; optional

or, where texts become token ids ahead of time, it makes them around a model:

    encode(sources, targets, tokenizer, *, source_prefix, source_suffix, max_source_length,
           max_target_length) -> EncodedPairs; used by preprocessing; where it also takes
           truncation_side, the pipeline can say which end of a source is cut off
    build(model, tokenizer, *, source_length, target_length) -> Recipe
        used by training and prediction; with `settings` too where the module has `Settings`
    TARGETS: as above, of recipes whose targets are no texts; `encode` gets none of them then
    TAKES_PAIRS: whether a source may be two texts (`data.pair_key`), joined by `PAIR_SEPARATOR`
    encode_texts(texts, tokenizer, *, max_length) -> EncodedPairs; optional: plain texts too
    TAKES_CONVERSATIONS: whether rows are conversations (`data.format`); then
        encode(chats, template, *, train_on, max_length, on_too_long) -> EncodedPairs
    FAMILIES, DEFAULT_FAMILY: as above
    CAN_PACK: whether several examples can share a row (`Recipe.collate_packed`)
    MEASURES_PERPLEXITY: whether `perplexity` stands beside `eval_loss`

The top of a recipe of this package imports nothing heavy, for plans ask it which module `encode`
comes from.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, ValidationInfo

from redco_flow import recipes
from redco_flow.errors import UnusableRow
from redco_flow.spec.model import OnlyWhereSet, Text
from redco_flow.spec.names import find_module, import_named, named_module
from redco_flow.spec.recipe_settings import SETTINGS, read_settings, settings_model

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from redco_flow.text.tokenizer import TextTokenizer

    Lengths = NDArray[np.int64]

Example = Mapping[str, Any]
Class = str | int
Batch = dict[str, Any]
Collate = Callable[[Sequence[Example]], Batch]
CollatePacked = Callable[[Sequence[Sequence[Example]]], Batch]


@dataclass(frozen=True)
class RandomChoice:
    """How the model's distribution is changed before a token is drawn from it.

    Args:
        temperature: what logits are divided by; towards 0 the likeliest token wins.
        top_k: only the `top_k` likeliest tokens may be drawn; None: all.
        top_p: of those, only the fewest likeliest whose probabilities reach this sum.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0


@dataclass(frozen=True)
class Generation:
    """How texts are generated.

    Args:
        max_length: tokens to generate at most, the end token included.
        num_beams: 1 is greedy search.
        length_penalty: a beam's score is divided by its length to this power.
        early_stopping: when beam search ends a row: True with the first `num_beams` texts that
            ended, False when the best other one is no better as long as it is, "never" when it
            could not be at any length.
        repetition_penalty: more than 1 makes tokens that the text has less likely.
        no_repeat_ngram_size: no run of so many tokens occurs twice; 0: any may.
        min_new_tokens: no text ends before.
        sampling: draw tokens, by each example's own key, instead of searching.
        num_return_sequences: texts of each example; the first is the one that counts.
    """

    max_length: int
    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    min_new_tokens: int = 0
    sampling: RandomChoice | None = None
    num_return_sequences: int = 1


class BadExample(UnusableRow):
    """A row that a recipe cannot use."""


@dataclass(frozen=True)
class TokenLikelihoods:
    """How likely a decoder-only model finds some tokens after others, as they are.

    Args:
        collate_to: (T,) -> a collate_fn of examples with `context_ids` and `continuation_ids`,
            which nothing is put before; together they have at most T + 1 ids.
        score_fn: (params, batch, rngs) -> `log_likelihood` (B,), summed over the continuation, in
            nats, and `is_greedy` (B,): whether each of its tokens is the likeliest one.
        max_length: the most tokens that the model reads at once.
    """

    collate_to: Callable[[Sequence[int]], Collate]
    score_fn: Callable[[Any, Batch, Any], Mapping[str, Any]]
    max_length: int


@dataclass(frozen=True)
class Recipe:
    """A paradigm's three functions around one model; what only texts have is optional.

    Args:
        model: JSON that the same recipe is made from again, without any file.
        init_params: (key) -> parameters drawn anew; can be jitted.
        abstract_params: () -> their shapes and dtypes, allocating nothing.
        collate_fn: examples -> arrays with a leading batch dim, padded to the longest lengths.
        loss_fn: (params, batch, rngs, is_training) -> a scalar, or (totals (B,), weights (B,)), and
            what else is measured as a third, {name: totals (B,)}.
        make_pred_fn: Generation -> (params, batch, rngs) -> arrays (B, ...); of generated texts
            token ids (B, T), or (B, N, T) where N sequences are asked for, and N is not 1.
        output_fn: those arrays -> a JSON value per row; of token ids, texts.
        collate_prompts: examples -> what `make_pred_fn`'s functions take, padded to the longest
            length; None: as `collate_fn`.
        load_params: (shardings) -> parameters read from the model's files, or None where the
            model has none and starts anew.
        row_widths: (tokens of each source (N,), of each target (N,)) -> (N, D): how wide a batch
            must be for each example, in each of the D dims that are padded; None where batches
            have one shape.
        id_widths: (column -> tokens of each row's (N,)) -> (N, D): as `row_widths`, of a recipe
            with `encode_row`.
        collate_to: (D widths) -> a collate_fn that pads to those; None likewise.
        collate_packed: (width) -> lists of examples -> arrays in which each list shares a row;
            None where examples cannot share one.
        save_pretrained: (params, directory): write the model in Hugging Face's format; None where
            there is no such format.
        prompt_widths: (tokens of each source (N,)) -> (N, D): how wide a batch of prompts must be
            for each example; None where all such batches are as wide as `collate_prompts`'.
        collate_prompts_to: (D widths) -> a collate_prompts that pads to those; None likewise.
        loss_in_chunks: ("auto" or the number of chunks) -> a loss_fn that scores the vocabulary
            chunk by chunk; where the setting is not 0, with `z_loss=…` or `label_smoothing=…`,
            which training alone has. None where the recipe has none.
        with_config: (changes of the model's config) -> this recipe of the model that has them;
            None where the recipe makes none.
        token_likelihoods: how likely the model finds given tokens; None where it cannot tell.
        head_parts: names at the top of the parameters' tree of a head of labels, and of whatever
            else the model's files do not have, so that it is drawn: low-rank adaptation trains
            these parts in full.
    """

    model: Mapping[str, Any]
    init_params: Callable[[Any], Any]
    abstract_params: Callable[[], Any]
    collate_fn: Collate
    loss_fn: Callable[[Any, Batch, Any, bool], Any]
    make_pred_fn: Callable[[Generation], Callable[[Any, Batch, Any], Any]]
    output_fn: Callable[[Any], Sequence[Any]]
    collate_prompts: Collate | None = None
    load_params: Callable[[Any], Any] | None = None
    row_widths: Callable[[Lengths, Lengths], Lengths] | None = None
    id_widths: Callable[[Callable[[str], Lengths]], Lengths] | None = None
    collate_to: Callable[[Sequence[int]], Collate] | None = None
    collate_packed: Callable[[int], CollatePacked] | None = None
    save_pretrained: Callable[[Any, Path], None] | None = None
    prompt_widths: Callable[[Lengths], Lengths] | None = None
    collate_prompts_to: Callable[[Sequence[int]], Collate] | None = None
    loss_in_chunks: Callable[..., Callable[[Any, Batch, Any, bool], Any]] | None = None
    with_config: Callable[[Mapping[str, Any]], Recipe] | None = None
    token_likelihoods: TokenLikelihoods | None = None
    head_parts: tuple[str, ...] = ()

    @property
    def collate_for_prediction(self) -> Collate:
        """What makes the batches of `make_pred_fn`'s functions."""
        return self.collate_prompts or self.collate_fn

    def collate_wide(self, widths: Sequence[int]) -> Collate:
        """Return the collate_fn of some widths, which a recipe with `row_widths` has."""
        assert self.collate_to is not None, "row_widths without collate_to"
        return self.collate_to(widths)

    def widths_of(self, lengths: Callable[[str], Lengths]) -> Lengths:
        """Return how wide a batch must be for each example, (N, D), given its columns' lengths."""
        if self.id_widths is not None:
            return self.id_widths(lengths)
        assert self.row_widths is not None, "a recipe of token ids says how wide their rows are"
        return self.row_widths(lengths("source_ids"), lengths("target_ids"))

    @property
    def has_widths(self) -> bool:
        """Whether batches may have several shapes."""
        return self.row_widths is not None or self.id_widths is not None


@dataclass(frozen=True)
class TokenLengths:
    """What a recipe of texts is built for: a tokenizer, and the longest texts in tokens."""

    tokenizer: TextTokenizer
    source_length: int
    target_length: int


CLASSES, NUMBERS = "classes", "numbers"
LABELS = "labels"
"""The key of a `Recipe.model` whose head scores labels: their names, none of a number."""


def kind_of_targets(recipe: ModuleType) -> str | None:
    """Return what a recipe's targets are: CLASSES, NUMBERS, or None where it does not say."""
    return getattr(recipe, "TARGETS", None)


def matmul_precision(model: Mapping[str, Any]) -> str | None:
    """Return how a Deployer is to multiply for a `Recipe.model`: float32 means all of float32.

    None, JAX's default, where its products are narrower or the model does not tell its `dtype`.
    """
    return "highest" if model.get("dtype") == "float32" else None


def find_own_recipe(name: str) -> ModuleType | None:
    """Import a recipe of this package, which is light; None for another's, and for none."""
    if not name.isidentifier() or importlib.util.find_spec(recipe_module(name)) is None:
        return None
    module = importlib.import_module(recipe_module(name))
    return module if hasattr(module, "build") else None


_WITH_FAMILIES = (
    "text_to_text",
    "language_modeling",
    "chat",
    "classification",
    "regression",
    "image_classification",
    "image_to_text",
)


def family_problem(recipe: ModuleType, family: str) -> str | None:
    """Say why a recipe does not train a family, or None where it does."""
    trained = getattr(recipe, "FAMILIES", (family,))
    if family in trained:
        return None
    name = recipe.__name__.removesuffix(".config").rpartition(".")[2]
    others = [
        other
        for other in _WITH_FAMILIES
        if other != name and family in importlib.import_module(recipe_module(other)).FAMILIES
    ]
    advice = f"; for '{family}' use recipe {others[0]}" if others else ""
    return f"recipe '{name}' trains {', '.join(trained)}, and not '{family}'{advice}."


def recipe_module(name: str) -> str:
    """Return a recipe's dotted module: its name in this package, or the one that `name` says."""
    return named_module(recipes.__name__, name)


def encodes(recipe: ModuleType) -> bool:
    """Whether preprocessing makes token ids for a recipe; for others it keeps rows as they are."""
    return hasattr(recipe, "encode")


def takes_conversations(recipe: ModuleType) -> bool:
    """Whether a recipe's rows are conversations, which a chat template renders."""
    return bool(getattr(recipe, "TAKES_CONVERSATIONS", False))


def takes_truncation_side(name: str) -> bool:
    """Whether YAML names a recipe whose `encode` can cut sources at either end."""
    try:
        encode = getattr(find_recipe(name), "encode", None)
    except ValueError:  # is reported where the recipe is checked
        return True
    return encode is not None and "truncation_side" in inspect.signature(encode).parameters


def encodes_rows(recipe: ModuleType) -> bool:
    """Whether preprocessing keeps token ids beside the rows of a recipe that takes them."""
    return hasattr(recipe, "encode_row")


def takes_messages(recipe: ModuleType) -> bool:
    """Whether columns of a recipe of rows may hold messages, which a chat template renders."""
    return bool(getattr(recipe, "TAKES_MESSAGES", False))


def needs_reference(name: str, settings: Mapping[str, Any]) -> bool:
    """Whether a recipe's examples need a reference's scores; False of what cannot be read.

    Args:
        settings: as they stand in YAML.
    """
    try:
        recipe = find_recipe(name)
        asks = getattr(recipe, "needs_reference", None)
        return asks is not None and bool(asks(read_settings(recipe, settings)))
    except ValueError:  # told where the recipe and its settings are checked
        return False


def shares_model(one: str, other: str) -> bool:
    """Whether two recipes train the same model, so that each reads the other's checkpoints."""
    return _model_of(one) == _model_of(other)


def _model_of(name: str) -> str:
    return str(getattr(find_recipe(name), "SAME_MODEL_AS", name))


def builds(recipe: ModuleType) -> bool:
    """Whether a recipe makes a `Recipe` around the model that the pipeline names."""
    return hasattr(recipe, "build")


def _checked_recipe(name: str) -> str:
    """Return the name of a recipe, after a look at its module where it is a user's own.

    Raises:
        ValueError: it cannot be imported, or lacks a function.
    """
    if name.isidentifier():
        return name
    try:
        exists = find_module(recipes.__name__, name) is not None
    except ValueError:
        exists = False
    if exists:  # that there is none is told as such
        settings_type = getattr(find_recipe(name), SETTINGS, None)
        if settings_type is not None:
            settings_model(settings_type)
    return name


def _checked_settings(settings: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
    """Return a Config's settings.

    Raises:
        ValueError: there are some, and the recipe has none.
    """
    name = info.data.get("recipe")  # what is wrong with the recipe is told as such
    if settings and name is not None and not hasattr(find_recipe(name), SETTINGS):
        raise ValueError(f"recipe '{name}' has no settings: its module has no class {SETTINGS}.")
    return settings


RecipeName = Annotated[Text, AfterValidator(_checked_recipe)]
"""The type of a Config's `recipe`: one of a user's own has what a recipe needs."""

RecipeSettings = Annotated[dict[str, Any], AfterValidator(_checked_settings), OnlyWhereSet()]
"""The type of a Config's `settings`, after its `recipe`; a pipeline's are typed by the recipe."""


def makes_texts(name: str) -> bool:
    """Whether YAML names a recipe that generates texts; of one that cannot be found it may."""
    try:
        recipe = find_recipe(name)
    except ValueError:
        return True
    if text_columns(recipe):
        return not encodes_rows(recipe)
    return encodes(recipe) and kind_of_targets(recipe) is None


def text_columns(recipe: ModuleType) -> tuple[str, ...]:
    """Return the columns of a recipe of rows whose texts a tokenizer is for; none of others."""
    return () if encodes(recipe) else tuple(getattr(recipe, "TEXT_COLUMNS", ()))


def is_of_rows(name: str) -> bool:
    """Whether YAML names a recipe that takes rows as they are; False where there is none."""
    try:
        return not encodes(find_recipe(name))
    except ValueError:
        return False


def is_conversational(name: str) -> bool:
    """Whether YAML names a recipe of conversations; False where there is none of that name."""
    try:
        return takes_conversations(find_recipe(name))
    except ValueError:
        return False


def has_no_ids(name: str) -> bool:
    """Whether YAML names a recipe whose examples have no token ids."""
    return is_of_rows(name) and not encodes_rows(find_recipe(name))


def has_no_texts(name: str) -> bool:
    """Whether YAML names a recipe of rows that no tokenizer is for."""
    return is_of_rows(name) and not text_columns(find_recipe(name))


def find_recipe(name: str) -> ModuleType:
    """Import a recipe.

    Raises:
        ValueError: there is no such module, or it lacks a function.
    """
    try:
        module = import_named(recipe_module(name))
    except ValueError as error:
        raise ValueError(f"recipe '{name}': {error}") from error
    of_texts = ("encode", "build")
    has_any = any(hasattr(module, function) for function in of_texts)
    if has_any and (encodes(module) or not hasattr(module, "collate_fn")):
        missing = [function for function in of_texts if not hasattr(module, function)]
        if missing:
            raise ValueError(f"the recipe module '{name}' lacks {' and '.join(missing)}.")
    elif problem := problem_of_functions(module):
        raise ValueError(f"the recipe module '{name}' {problem}")
    if problem := _problem_of_targets(module):
        raise ValueError(f"the recipe module '{name}' {problem}")
    return module


def _problem_of_targets(module: ModuleType) -> str | None:
    """Say that a module's TARGETS are nothing, or that its settings cannot get its classes."""
    targets = kind_of_targets(module)
    if targets not in (None, CLASSES, NUMBERS):
        return f"has TARGETS {targets!r}; they are {CLASSES!r} or {NUMBERS!r}."
    if targets and not encodes(module) and RowColumns.of(module).target is None:
        return f"has TARGETS {targets!r} and no TARGET: say which of its COLUMNS holds them."
    settings_type = getattr(module, SETTINGS, None)
    if targets == CLASSES and (
        settings_type is None or CLASSES not in settings_model(settings_type).model_fields
    ):
        return (
            f"has TARGETS {targets!r}, whose names its {SETTINGS} get: give that a field "
            f"'{CLASSES}: list[str | int]', empty by default."
        )
    return None


def has_own_model(name: str) -> bool:
    """Whether YAML names a recipe of rows that brings its model, so that none is to be chosen."""
    return is_of_rows(name) and not builds(find_recipe(name))


NUM_ARGUMENTS: Mapping[str, int] = {
    "init_params": 1,
    "collate_fn": 1,
    "loss_fn": 4,
    "pred_fn": 3,
}
"""The functions of a recipe of rows, and their arguments without the settings."""

OPTIONAL_ARGUMENTS: Mapping[str, int] = {"output_fn": 1}


def problem_of_functions(module: ModuleType) -> str | None:
    """Say what a module lacks of a recipe of rows, or None."""
    needed = NUM_ARGUMENTS
    if builds(module):
        needed = {"collate_fn": 1, "build": 1 + bool(text_columns(module))}
    missing = [name for name in needed if not callable(getattr(module, name, None))]
    if missing:
        return (
            f"lacks {', '.join(missing)}: a recipe has {', '.join(NUM_ARGUMENTS)}, or encode and "
            "build where texts are encoded ahead of time."
        )
    num_more = int(hasattr(module, SETTINGS))
    for name, count in {**needed, **OPTIONAL_ARGUMENTS}.items():
        function = getattr(module, name, None)
        if function is None or _takes(function, count + num_more):
            continue
        last = f", the last of which are the {SETTINGS}" if num_more else ""
        return f"has a {name} that cannot be called with {count + num_more} arguments{last}."
    columns, target = getattr(module, "COLUMNS", None), getattr(module, "TARGET", None)
    if columns is not None and not (
        isinstance(columns, tuple | list) and all(isinstance(one, str) for one in columns)
    ):
        return f"has COLUMNS that are no tuple of names: {columns!r}."
    if target is not None and not (isinstance(target, str) and target in (columns or (target,))):
        return f"has a TARGET that is none of its COLUMNS: {target!r}."
    return None


def _takes(function: Callable[..., Any], count: int) -> bool:
    try:
        inspect.signature(function).bind(*range(count))
    except (TypeError, ValueError):
        return False
    return True


@dataclass(frozen=True)
class RowColumns:
    """What a recipe of rows says of them.

    Args:
        names: the columns that it reads, by its own names; None: whatever there is.
        target: the column that predictions are compared with; None: no column is.
    """

    names: tuple[str, ...] | None
    target: str | None

    @classmethod
    def of(cls, recipe: ModuleType) -> RowColumns:
        """Read `COLUMNS` and `TARGET`, which is the column `label` where nothing says it."""
        columns = getattr(recipe, "COLUMNS", None)
        names = None if columns is None else tuple(columns)
        default = "label" if names is None or "label" in names else None
        return cls(names, getattr(recipe, "TARGET", default))
