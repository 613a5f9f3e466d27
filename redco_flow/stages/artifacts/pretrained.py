"""A published model's directory, read as a checkpoint is: recipe, tokenizer and parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from redco_flow.errors import ArtifactError
from redco_flow.hub import config_in
from redco_flow.recipes.find import find_recipe
from redco_flow.recipes.parts.model import find_checkpoint
from redco_flow.recipes.recipe import CLASSES, Recipe, TokenLengths
from redco_flow.stages.artifacts.checkpoint import ModelRecord, TrainedModel
from redco_flow.stages.artifacts.published import head_problem, labels_of
from redco_flow.text.tokenizer import TextTokenizer


@dataclass(frozen=True)
class PretrainedModel(TrainedModel):
    """A model in a directory, or on the hub.

    Args:
        recipe_name: of one that reads it.
        recipe: made around the directory's files.
        texts: the tokenizer, and the longest texts; None of a model without one.
    """

    recipe_name: str
    recipe: Recipe
    texts: TokenLengths | None

    @classmethod
    def load(
        cls, model: Mapping[str, Any], recipe: str, texts: TokenLengths | None
    ) -> PretrainedModel:
        """Read the configuration.

        Args:
            model: the keys of a `model` section, and the recipe's `settings`.

        Raises:
            ArtifactError: a head that the recipe needs is not among the parameters.
            ValueError: there is no such model, or the recipe does not read it.
        """
        name, revision = str(model["name_or_path"]), model.get("revision")
        folder = find_checkpoint(name, revision=revision, with_weights=False)
        config = config_in(folder) or {}
        settings = dict(model.get("settings") or {})
        if find_recipe(recipe).targets == CLASSES and not settings.get(CLASSES):
            settings[CLASSES] = labels_of(folder, config)
        if problem := head_problem(folder, config, recipe, settings):
            raise ArtifactError(problem)
        made = find_recipe(recipe).make({**model, "settings": settings}, texts)
        return cls(recipe, made, texts)

    @cached_property
    def record(self) -> ModelRecord:
        """The recipe and the model; of step 0."""
        texts = self.texts
        return ModelRecord(
            recipe=self.recipe_name,
            model=self.recipe.model,
            source_length=texts.source_length if texts else 0,
            target_length=texts.target_length if texts else 0,
            tokenizer_digest=texts.tokenizer.digest if texts else "",
            step=0,
        )

    @property
    def tokenizer(self) -> TextTokenizer:
        """The tokenizer of the model's texts."""
        assert self.texts is not None, "a recipe of texts has a tokenizer"
        return self.texts.tokenizer

    def read_params(self, recipe: Recipe, shardings: Any) -> Any:
        """Read the parameters; see `TrainedModel`. `recipe` has this model."""
        assert self.recipe.load_params is not None, "a directory has parameters"
        return self.recipe.load_params(shardings)
