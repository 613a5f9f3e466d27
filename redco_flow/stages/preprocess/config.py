"""preprocess: raw rows in, a dataset of token ids with its tokenizer out.

Plans import it on login nodes, so it imports neither JAX nor `run`, which does the work. Equal
inputs give a byte-identical dataset, whatever the number of workers and shards.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from redco_flow.recipes.declared import DeclaredRecipe, RowsRecipe, TextRecipe
from redco_flow.recipes.find import (
    RecipeName,
    RecipeSettings,
    find_own_recipe,
    find_recipe,
    find_recipe_if_any,
)
from redco_flow.runtime.context import FinishedStage
from redco_flow.spec.model import (
    OfTraining,
    OnlyWhereSet,
    Placement,
    PositiveInt,
    Scalar,
    Text,
)
from redco_flow.spec.names import nearest, quoted
from redco_flow.spec.pipeline import DataSection, ModelSection
from redco_flow.spec.recipe_settings import values_of
from redco_flow.spec.stage_kind import InputSlot, NamedFiles, StageConfig
from redco_flow.stages.artifacts.tokenizer import template_files, tokenizer_files
from redco_flow.stages.data import source
from redco_flow.stages.data.named_images import named_images
from redco_flow.stages.preprocess.heads import head_problems
from redco_flow.text.chat import OnTooLong, TrainOn, template_text
from redco_flow.text.conversations import DEFAULT_KEYS
from redco_flow.text.pairs import TruncationSide
from redco_flow.tracking.artifacts import ArtifactStore
from redco_flow.tracking.row_counts import RowLosses
from redco_flow.tracking.workspace import Workspace

SECTIONS = ("recipe", "settings", "model", "data")
INPUTS = {
    "tokenizer_of": InputSlot(kind="", is_optional=True),
    "curation": InputSlot(kind="curation", is_optional=True),
}
OUTPUTS = {"dataset": "dataset"}
EXAMPLES_MODULE = "redco_flow.stages.preprocess.shown"


class TokenizerModel(ModelSection):
    """The model section as preprocessing sees it: only whose tokenizer it is."""

    reads_weights: ClassVar[bool] = False

    family: Annotated[Text | None, Placement()] = None
    config: Annotated[dict[str, Scalar | dict[str, Scalar]], Placement()] = Field(
        default_factory=dict
    )
    dtype: Annotated[Literal["float32", "bfloat16"], Placement()] = "float32"
    from_scratch: Annotated[bool, Placement()] = False


class Config(StageConfig):
    """Preprocessing; the input `tokenizer_of` takes the tokenizer of a dataset or checkpoint, and
    `curation` leaves out the rows that a stage of kind curate found.

    Args:
        recipe: the pipeline's own where the stage does not say it.
        settings: the recipe's.
        model, data: the pipeline's sections of these names, with changes for this stage.
        max_source_length, max_target_length: in tokens, the end token included; more is cut off.
            Plain texts are cut into pieces of max_target_length, of which each is an example.
        truncation_side: which end of a source is cut off where it has more tokens than
            max_source_length: `right` (None) keeps its beginning, `left` its end.
            data.source_suffix is never cut off; data.source_prefix is the beginning of the source.
        max_length: of conversations: all of one, in tokens; None: 2048.
        on_too_long: of conversations beyond that: `truncate` their end (None), `drop` them, both
            counted; or `error`: such a row is a bad one.
        train_on: of conversations: learn the `assistant`'s turns (None), the `last` of them, or
            `all` tokens.
        num_workers: processes that encode.
        num_shards: parts that are encoded by tasks of their own where the executor has job arrays
            (Slurm); elsewhere one job encodes all.
    """

    LEFT_OUT: ClassVar[tuple[type, ...]] = (Placement, OfTraining)

    recipe: RecipeName = "text_to_text"
    settings: RecipeSettings = Field(default_factory=dict)
    model: TokenizerModel = TokenizerModel()
    data: DataSection
    max_source_length: Annotated[int, Field(ge=2)] = 512
    max_target_length: Annotated[int, Field(ge=2)] = 128
    truncation_side: Annotated[TruncationSide | None, OnlyWhereSet()] = None
    max_length: Annotated[Annotated[int, Field(ge=2)] | None, OnlyWhereSet()] = None
    on_too_long: Annotated[OnTooLong | None, OnlyWhereSet()] = None
    train_on: Annotated[TrainOn | None, OnlyWhereSet()] = None
    num_workers: Annotated[PositiveInt, Placement()] = 1
    num_shards: Annotated[PositiveInt, Placement()] = 1

    @property
    def _declared(self) -> DeclaredRecipe | None:
        return find_recipe_if_any(self.recipe)

    @field_validator("data")
    @classmethod
    def _can_be_read(cls, data: DataSection, info: ValidationInfo) -> DataSection:
        name = info.data.get("recipe", "")
        problem = source.problem_of(data)
        recipe = find_recipe_if_any(name)
        if isinstance(recipe, RowsRecipe):
            problem = problem or problem_of_rows(data, recipe)
        elif isinstance(recipe, TextRecipe) and find_own_recipe(name):
            problem = problem or problem_of_texts(data, recipe)
        if problem:
            raise ValueError(problem)
        return data

    @model_validator(mode="after")
    def _says_what_its_rows_have(self) -> Config:
        if self._declared and self._declared.takes_conversations:
            names: tuple[str, ...] = ("max_source_length", "max_target_length")
            why = "use max_length."
        else:
            names = ("max_length", "on_too_long", "train_on")
            why = "they are of recipe chat."
        fields = type(self).model_fields
        given = [name for name in names if getattr(self, name) != fields[name].default]
        if given:
            raise ValueError(
                f"{quoted(given)} would change nothing for recipe '{self.recipe}': {why}"
            )
        return self

    @model_validator(mode="after")
    def _cuts_sources(self) -> Config:
        if self.truncation_side is None:
            return self
        if self.data.text_key is not None:
            raise ValueError("'truncation_side' would change nothing: plain texts have no source")
        recipe = self._declared
        if recipe and not (
            isinstance(recipe, TextRecipe)
            and recipe.cuts_either_end
            and not recipe.takes_conversations
        ):
            raise ValueError(
                f"'truncation_side' would change nothing: recipe '{self.recipe}' cuts no source "
                "texts"
            )
        return self

    @model_validator(mode="after")
    def _cuts_what_has_tokens(self) -> Config:
        fields, recipe = type(self).model_fields, self._declared
        lengths = ("max_source_length", "max_target_length")
        given = [name for name in lengths if getattr(self, name) != fields[name].default]
        if given and recipe and recipe.is_of_rows:
            raise ValueError(
                f"{quoted(given)} would change nothing: recipe '{self.recipe}' takes rows as they "
                "are"
            )
        if "max_source_length" in given and self.data.text_key is not None:
            raise ValueError(
                "'max_source_length' would change nothing: plain texts (data.text_key) have no "
                "source; their pieces have max_target_length tokens"
            )
        if "max_target_length" in given and recipe and not recipe.makes_texts:
            raise ValueError(
                f"'max_target_length' would change nothing: the targets of recipe '{self.recipe}' "
                "are not texts"
            )
        return self


_OF_TEXTS = (
    "text_key",
    "source_key",
    "pair_key",
    "target_key",
    "mixture",
    "part_key",
    "source_prefix",
    "source_suffix",
    "group_by_source",
    "tokenizer",
)


def problem_of_rows(data: DataSection, recipe: RowsRecipe) -> str | None:
    """Say which keys have no meaning to a recipe of rows, or name a column that it has not."""
    used = ["data.tokenizer"] if recipe.has_tokenizer else []
    used += ["data.source_prefix", "data.source_suffix"] if recipe.has_ids else []
    if recipe.takes_messages:
        used += ["data.chat_template", "data.chat_template_kwargs"]
        if problem := problem_of_template(data):
            return problem
    useless = [key for key in _changed(data, (*_OF_TEXTS, *_OF_CHATS)) if key not in used]
    if useless:
        return (
            f"{quoted(useless)} would change nothing: recipe '{recipe.name}' takes rows as they "
            "are. Name their columns in data.columns."
        )
    names = recipe.columns
    for key in data.columns:
        if names is not None and key not in names:
            return (
                f"recipe '{recipe.name}' reads no column '{key}'{nearest(key, names)} Its columns: "
                f"{', '.join(names)}."
            )
    return None


_OF_CHATS = (
    "format",
    "messages_key",
    "chat_template",
    "chat_template_kwargs",
    "default_system_message",
)


def problem_of_texts(data: DataSection, recipe: TextRecipe) -> str | None:
    """Say which keys have no meaning to a recipe of texts."""
    if recipe.takes_conversations:
        return problem_of_chats(data)
    if given := _changed(data, _OF_CHATS):
        return f"{quoted(given)} would change nothing: rows are conversations in recipe chat alone."
    if data.columns:
        return (
            "'data.columns' are of recipes of rows; of texts data.source_key and data.target_key."
        )
    name = recipe.name
    if data.pair_key is not None and not recipe.takes_pairs:
        return f"'data.pair_key' gives pairs of source texts, and recipe '{name}' takes one text."
    if data.text_key is None or recipe.encode_texts is not None:
        return None
    return (
        f"'data.text_key' gives plain texts, and recipe '{name}' takes pairs: use recipe "
        "language_modeling, or data.source_key and data.target_key."
    )


def _changed(data: DataSection, names: Sequence[str]) -> list[str]:
    defaults = type(data)()
    return [f"data.{key}" for key in names if getattr(data, key) != getattr(defaults, key)]


def problem_of_chats(data: DataSection) -> str | None:
    """Say what of the section has no meaning to conversations, or names no template."""
    useless = _changed(data, ("columns", *(key for key in _OF_TEXTS if key != "tokenizer")))
    if useless:
        return (
            f"{', '.join(useless)} would change nothing: of conversations data.format and "
            "data.messages_key say where they stand."
        )
    if data.messages_key is not None and data.format not in (None, *DEFAULT_KEYS):
        return f"data.messages_key would change nothing: rows of format '{data.format}' have none."
    return problem_of_template(data)


def problem_of_template(data: DataSection) -> str | None:
    """Say that there is no chat template of this name, or none of a trained tokenizer's tokens."""
    name = data.chat_template
    if name is not None and "/" not in name:
        try:
            template_text(name)
        except ValueError as error:
            return str(error)
    is_trained = data.tokenizer is not None and data.tokenizer.train is not None
    if is_trained and name not in (None, "chatml"):
        return (
            "a trained tokenizer has the special tokens of chatml alone: leave data.chat_template "
            "out, or give data.tokenizer.name_or_path."
        )
    return None


def input_problems(config: Config, given: Collection[str]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield that there is no tokenizer, or that there are two."""
    data, is_taken = config.data, "tokenizer_of" in given
    if is_taken and data.tokenizer is not None:
        yield (
            ("data", "tokenizer"),
            "the stage takes its tokenizer from `tokenizer_of`: leave one of the two out",
        )
    has_one = is_taken or data.tokenizer is not None or config.model.name_or_path is not None
    recipe = find_recipe_if_any(config.recipe)
    if not has_one and (recipe is None or recipe.has_tokenizer):
        yield (
            ("data",),
            "there is no tokenizer: give data.tokenizer: {train: {vocab_size: 4096}}, or "
            "data.tokenizer.name_or_path, or a model.name_or_path that has one, or another "
            "stage's by `tokenizer_of`.",
        )


def code_modules(config: Config) -> list[str]:
    """The module that encodes, or checks rows, and the one that makes rows, if one does."""
    own = find_recipe(config.recipe).preprocessing_module
    return [own, *source.data_modules(config.data)]


def data_files(config: Config) -> list[Path]:
    """The raw data, and a tokenizer that lies in a local directory."""
    files = [*source.data_files(config.data), *tokenizer_files(config.model, config.data)]
    recipe = find_recipe(config.recipe)
    if recipe.takes_conversations or recipe.takes_messages:
        files += template_files(config.data)
    return files


def named_files(config: Config, workspace: Workspace | None = None) -> Mapping[Path, NamedFiles]:
    """The images that rows name by path, by data file; `workspace` has a cache of the paths."""
    recipe, renamed = find_recipe_if_any(config.recipe), config.data.columns
    if not isinstance(recipe, RowsRecipe):
        return {}
    names = recipe.columns
    if names is not None:
        names = tuple(renamed.get(one, one) for one in names if one not in recipe.text_columns)
    return named_images(config.data, names, workspace)


def data_problems(config: Config) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield what the first rows of the data files show to be wrong, and the key that names them."""
    settings, only_last = values_of(config.settings), config.train_on not in (None, "assistant")
    for key, problem in head_problems(config.data, config.recipe, settings, only_last=only_last):
        yield ("data", key), problem


def conclude(_config: Config, finished: FinishedStage) -> str:
    """Return how many rows were skipped or truncated, for the line of the completed stage."""
    artifact = ArtifactStore(finished.workspace).find(finished.result.outputs["dataset"])
    return "" if artifact is None else RowLosses.of(artifact.metadata).brief


def data_identity(config: Config) -> dict[str, Any]:
    """Identifiers of data that is not a file."""
    return source.data_identity(config.data)
