"""predict: a checkpoint and a dataset in, one text per example out, in input order.

Light at the top, for plans read its Config; the work is in `prediction`, imported when it runs.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from redco_flow.models.find import FAMILIES, find_module_name
from redco_flow.recipes.recipe import recipe_module
from redco_flow.spec.model import NonNegativeInt, Placement, PositiveFloat, PositiveInt, Text
from redco_flow.spec.stage_kind import InputSlot, StageConfig

SECTIONS = ("recipe",)
INPUTS = {
    "dataset": InputSlot(kind="dataset"),
    "checkpoint": InputSlot(kind="checkpoint", default_selector="last"),
}
OUTPUTS = {"predictions": "predictions"}
SEVERAL_PROCESSES = True


class Config(StageConfig):
    """Prediction.

    Args:
        recipe: the checkpoint's; the pipeline's own where the stage does not say it.
        split: None means test, or validation where the dataset has no test split.
        num_beams: 1 is greedy search.
        length_penalty: a beam's score is divided by its length to this power.
        do_sample: draw tokens by the model's probabilities; what an example gets depends on its
            place in the split and the seed, not on the batch.
        temperature: what logits are divided by; towards 0 the likeliest token wins.
        top_k: only so many of the likeliest tokens may be drawn.
        top_p: of those, only the fewest likeliest whose probabilities reach this sum.
        seed: of the draws.
        prompt_length: tokens of a plain text that are given; the rest is generated.
        score_targets: also measure how likely the model finds each first reference, which
            perplexity needs; None: where the recipe measures perplexity.
        max_target_length: tokens to generate at most; None: what the dataset's targets need.
        num_examples: the first ones of the split; None: all.
        batch_size: examples at once over all devices.
        num_model_shards: devices that split every product among them.
    """

    recipe: Text = "text_to_text"
    split: Literal["train", "validation", "test"] | None = None
    num_beams: PositiveInt = 1
    length_penalty: float = 1.0
    do_sample: bool = False
    temperature: PositiveFloat = 1.0
    top_k: PositiveInt | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    seed: NonNegativeInt = 0
    prompt_length: NonNegativeInt = 16
    score_targets: bool | None = None
    max_target_length: PositiveInt | None = None
    num_examples: PositiveInt | None = None
    batch_size: Annotated[PositiveInt, Placement()] = 64
    num_model_shards: Annotated[PositiveInt, Placement()] = 1

    @field_validator("do_sample")
    @classmethod
    def _follows_one_text(cls, do_sample: bool, info: ValidationInfo) -> bool:  # noqa: FBT001
        if do_sample and info.data.get("num_beams", 1) > 1:
            raise ValueError("sampling follows one text per example; leave num_beams out")
        return do_sample

    @model_validator(mode="after")
    def _draws_what_is_described(self) -> Config:
        given = [name for name in _SAMPLING if getattr(self, name) != _default(name)]
        if given and not self.do_sample:
            raise ValueError(f"{', '.join(given)} change nothing without 'do_sample: true'")
        return self


_SAMPLING = ("temperature", "top_k", "top_p")


def _default(name: str) -> object:
    return Config.model_fields[name].default


def code_modules(config: Config) -> list[str]:
    """The recipe, and every family: which one the checkpoint is of, no plan can know."""
    return [recipe_module(config.recipe), *map(find_module_name, FAMILIES)]
