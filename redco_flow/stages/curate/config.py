"""The settings of curate."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator

from redco_flow.recipes.declared import TextRecipe
from redco_flow.recipes.find import (
    RecipeName,
    RecipeSettings,
    find_recipe,
    find_recipe_if_any,
)
from redco_flow.spec.model import PositiveInt
from redco_flow.spec.pipeline import DataSection
from redco_flow.spec.stage_kind import StageConfig
from redco_flow.stages.data import source
from redco_flow.stages.preprocess import config as preprocess

SECTIONS = ("recipe", "settings", "data")
OUTPUTS = {"curation": "curation"}

Share = Annotated[float, Field(gt=0, le=1)]


class Config(StageConfig):
    """Filters for training rows; a preprocessing that takes the result reads the remaining ones.

    Rows of evaluation splits all stay, held-out ones too: what is measured does not change with
    what is trained on.

    Args:
        recipe: the pipeline's own where the stage does not say it; one of texts or conversations.
        settings: the recipe's.
        data: the pipeline's section of this name, which the preprocessing has, too.
        near_duplicates: drop a row whose words are those of an earlier one to this extent (Jaccard
            similarity of their shingles); 1 drops equal ones alone; null none.
        shingle_words: neighbouring words of a shingle.
        contamination_words: drop a row that shares this number of consecutive words with a row of
            an evaluation split or, where that one's texts are all shorter, ends with the same
            texts; null none.
        min_words, max_words: drop shorter and longer rows. System messages of conversations count
            in none of these filters.
        min_letter_share: drop a row where fewer of the words have a letter in them.
        max_symbol_share: drop a row with more hash signs and ellipses per word.
        max_repeated_share: drop a row where the commonest three words in a row, if they come more
            than once, make up more of all its words.
    """

    recipe: RecipeName = "text_to_text"
    settings: RecipeSettings = Field(default_factory=dict)
    data: DataSection
    near_duplicates: Share | None = 0.8
    shingle_words: PositiveInt = 5
    contamination_words: PositiveInt | None = 13
    min_words: PositiveInt | None = None
    max_words: PositiveInt | None = None
    min_letter_share: Share | None = None
    max_symbol_share: Share | None = None
    max_repeated_share: Share | None = None

    @field_validator("recipe")
    @classmethod
    def _has_texts(cls, recipe: str) -> str:
        declared = find_recipe_if_any(recipe)
        if declared is not None and declared.is_of_rows:
            raise ValueError(
                f"recipe '{recipe}' takes rows as they are, and curate compares the texts of "
                "pairs, plain texts and conversations"
            )
        return recipe

    @field_validator("data")
    @classmethod
    def _whose_tokens_make_no_difference(cls, data: DataSection) -> DataSection:
        """Texts are compared: another tokenizer or template is no reason to do so again."""
        changes: dict[str, Any] = {"tokenizer": None, "chat_template": None}
        return data.model_copy(update=changes | {"chat_template_kwargs": {}})

    @model_validator(mode="after")
    def _can_be_read(self) -> Config:
        problem = source.problem_of(self.data)
        recipe = find_recipe(self.recipe)
        assert isinstance(recipe, TextRecipe)  # `_has_texts` refuses others
        problem = problem or preprocess.problem_of_texts(self.data, recipe)
        if problem:
            raise ValueError(problem)
        if self.min_words and self.max_words and self.min_words > self.max_words:
            raise ValueError(f"min_words {self.min_words} is above max_words {self.max_words}")
        if self.near_duplicates is not None and importlib.util.find_spec("datasketch") is None:
            raise ValueError(
                "near_duplicates needs the package datasketch: pip install 'redco-flow[curate]' "
                "(or near_duplicates: null)"
            )
        return self

    def preprocessing(self) -> preprocess.Config:
        """Return what reads the same rows."""
        return preprocess.Config(recipe=self.recipe, settings=self.settings, data=self.data)


def code_modules(config: Config) -> list[str]:
    """The module that makes rows, if one does."""
    return source.data_modules(config.data)


def data_files(config: Config) -> list[Path]:
    """The raw data."""
    return source.data_files(config.data)


def data_problems(config: Config) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield what the first rows of the data files show to be wrong, and the key that names them."""
    return preprocess.data_problems(config.preprocessing())


def data_identity(config: Config) -> dict[str, Any]:
    """Identity of data that is not in files."""
    return source.data_identity(config.data)
