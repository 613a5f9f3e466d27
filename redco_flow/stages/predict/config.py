"""predict: a checkpoint and a dataset in, one text per example out, in input order.

Imports little, because plans read its Config; the work is in `run`, imported when it starts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from redco_flow.models.find import FAMILIES, find_module_name
from redco_flow.recipes.find import RecipeName, find_recipe_if_any, recipe_module
from redco_flow.spec.model import (
    NonNegativeInt,
    OnlyWhereSet,
    Placement,
    PositiveFloat,
    PositiveInt,
    Texts,
)
from redco_flow.spec.names import quoted
from redco_flow.spec.pipeline import ModelSection
from redco_flow.spec.stage_kind import InputSlot, StageConfig
from redco_flow.stages.artifacts.tokenizer import model_files
from redco_flow.stages.device_layout import layout_problems

SECTIONS = ("recipe",)
INPUTS = {
    "dataset": InputSlot(kind="dataset"),
    "checkpoint": InputSlot(kind="checkpoint", default_selector="last", replaced_by="pretrained"),
    "reference_scores": InputSlot(kind="reference_scores", is_optional=True),
}
OUTPUTS = {"predictions": "predictions"}
SEVERAL_PROCESSES = True


class PretrainedSection(ModelSection):
    """A published model that predicts as it is.

    Args:
        settings: the recipe's, such as the names of the classes.
    """

    settings: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _has_parameters(self) -> PretrainedSection:
        if self.name_or_path is None or self.from_scratch:
            raise ValueError("a pretrained model needs 'name_or_path', and no 'from_scratch'")
        return self


class Config(StageConfig):
    """Prediction.

    Args:
        recipe: the checkpoint's; the pipeline's own where the stage does not say it.
        pretrained: a published model, such as a Hugging Face directory, in place of a checkpoint.
        split: None means test, or validation where the dataset has no test split.
        num_beams: 1 is greedy search.
        length_penalty: a beam's score is divided by its length to this power.
        early_stopping: when beam search ends a row: true as soon as `num_beams` texts have ended;
            false when the best other one, as long as it is, is no better than the worst of them;
            never when it could not be at any length.
        repetition_penalty: scores of tokens that the text has are divided by it where positive and
            multiplied where negative; above 1 they become less likely. A decoder-only model's
            text begins with its prompt.
        no_repeat_ngram_size: no run of this number of tokens occurs twice in a text; 0: any may.
        min_new_tokens: no text ends before it has this number.
        stop: strings of which the first that a text has ends it, and is left out. Tokens are
            generated beyond it and dropped.
        num_return_sequences: texts for each example, the best beams, or independent draws;
            metrics score the first, `predictions.jsonl` has all.
        do_sample: draw tokens by the model's probabilities; what an example gets depends on its
            place in the split and the seed, not on the batch.
        temperature: what logits are divided by; towards 0 the likeliest token wins.
        top_k: only the `top_k` likeliest tokens may be drawn.
        top_p: of those, only the fewest likeliest whose probabilities reach this sum.
        seed: of the draws.
        prompt_length: tokens of a plain text that are given; the rest is generated.
        score_targets: also measure how likely the model finds each first reference, which
            perplexity needs; None: where the recipe measures perplexity.
        probabilities: also write each class's probability, of recipes that give one.
        references: false for rows whose targets are placeholders: the predictions have no
            references, and nothing can be evaluated by them.
        max_target_length: tokens to generate at most; None: what the dataset's targets need.
        num_examples: the first ones of the split; None: all.
        batch_size: examples at once over all devices.
        num_model_shards: devices that split every product among them.
        fsdp: data-parallel devices that share one copy of the parameters as they are loaded.
            Generating gathers the decoder once a batch, in the model's dtype; the rest, and all
            where targets are scored, layer by layer.
    """

    recipe: RecipeName = "text_to_text"
    pretrained: Annotated[PretrainedSection | None, OnlyWhereSet()] = None
    split: Literal["train", "validation", "test"] | None = None
    num_beams: PositiveInt = 1
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    repetition_penalty: PositiveFloat = 1.0
    no_repeat_ngram_size: NonNegativeInt = 0
    min_new_tokens: NonNegativeInt = 0
    stop: Annotated[Texts | None, OnlyWhereSet()] = None
    num_return_sequences: PositiveInt = 1
    do_sample: bool = False
    temperature: PositiveFloat = 1.0
    top_k: PositiveInt | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    seed: NonNegativeInt = 0
    prompt_length: NonNegativeInt = 16
    score_targets: bool | None = None
    probabilities: Annotated[bool | None, OnlyWhereSet()] = None
    references: Annotated[bool | None, OnlyWhereSet()] = None
    max_target_length: PositiveInt | None = None
    num_examples: PositiveInt | None = None
    batch_size: Annotated[PositiveInt, Placement()] = 64
    num_model_shards: Annotated[PositiveInt, Placement()] = 1
    fsdp: Annotated[PositiveInt, Placement()] = 1

    @field_validator("do_sample")
    @classmethod
    def _follows_one_text(cls, do_sample: bool, info: ValidationInfo) -> bool:  # noqa: FBT001
        if do_sample and info.data.get("num_beams", 1) > 1:
            raise ValueError("sampling follows one text per example; leave num_beams out")
        return do_sample

    @model_validator(mode="after")
    def _generates_where_texts_are_made(self) -> Config:
        of_encoded = ("score_targets", "prompt_length")
        recipe = find_recipe_if_any(self.recipe)
        if recipe is None or not (recipe.is_of_rows or not recipe.makes_texts):
            return self
        useless = of_encoded if recipe.makes_texts else (*GENERATION, *of_encoded)
        given = [name for name in useless if name != "seed" and _is_changed(self, name)]
        if given:
            raise ValueError(
                f"recipe '{self.recipe}' predicts by its own pred_fn: {quoted(given)} would "
                "change nothing"
            )
        return self

    @field_validator("probabilities")
    @classmethod
    def _are_of_classes(cls, is_asked: bool | None, info: ValidationInfo) -> bool | None:  # noqa: FBT001
        recipe = find_recipe_if_any(info.data.get("recipe", ""))
        if is_asked and recipe is not None and not recipe.scores_classes:
            raise ValueError(f"recipe '{recipe.name}' gives classes no probabilities")
        return is_asked

    @model_validator(mode="after")
    def _draws_what_is_described(self) -> Config:
        given = [name for name in _SAMPLING if _is_changed(self, name)]
        if given and not self.do_sample:
            raise ValueError(f"{', '.join(given)} change nothing without 'do_sample: true'")
        return self

    @model_validator(mode="after")
    def _finds_as_many_texts_as_asked(self) -> Config:
        if not self.do_sample and self.num_return_sequences > self.num_beams:
            raise ValueError(
                f"num_return_sequences is {self.num_return_sequences} and num_beams "
                f"{self.num_beams}: beams give as many texts as there are; use more of them, or "
                "'do_sample: true'"
            )
        if self.early_stopping is not False and self.num_beams == 1:
            raise ValueError("early_stopping changes nothing without num_beams above 1")
        least, most = self.min_new_tokens, self.max_target_length
        if most is not None and least > most:
            raise ValueError(f"min_new_tokens is {least}, above max_target_length, {most}")
        return self


_SAMPLING = ("temperature", "top_k", "top_p")


GENERATION = (
    "num_beams",
    "length_penalty",
    "early_stopping",
    "repetition_penalty",
    "no_repeat_ngram_size",
    "min_new_tokens",
    "stop",
    "num_return_sequences",
    "max_target_length",
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
    "seed",
)
"""The settings that texts are generated with."""


def _is_changed(config: Config, name: str) -> bool:
    return bool(getattr(config, name) != Config.model_fields[name].default)


def input_problems(config: Config, given: Collection[str]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield that there are two models."""
    if config.pretrained is not None and "checkpoint" in given:
        yield ("pretrained",), "the stage takes a `checkpoint`: leave one of the two out"


def data_files(config: Config) -> list[Path]:
    """The files of a pretrained model that lies in a local directory."""
    return [] if config.pretrained is None else model_files(config.pretrained)


def device_problems(config: Config, num_devices: int) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield which settings this number of devices cannot have."""
    return layout_problems(config, num_devices)


def code_modules(config: Config) -> list[str]:
    """The recipe, and every family: which one the checkpoint is of, no plan can know."""
    return [recipe_module(config.recipe), *map(find_module_name, FAMILIES)]
