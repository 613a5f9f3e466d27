"""predict: a checkpoint and a dataset in, one text per example out, in input order.

Light at the top, for plans read its Config; the work is in `prediction`, imported when it runs.
"""

from __future__ import annotations

from typing import Annotated, Literal

from redco_flow.models.find import FAMILIES, find_module_name
from redco_flow.recipes.recipe import recipe_module
from redco_flow.spec.model import Placement, PositiveInt, Text
from redco_flow.spec.stage_kind import InputSlot, StageConfig
from redco_flow.stages.context import StageContext, StageOutputs

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
        split: None means test, or validation where the dataset has no test split.
        num_beams: 1 is greedy search.
        length_penalty: a beam's score is divided by its length to this power.
        max_target_length: tokens to generate at most; None: what the dataset's targets need.
        num_examples: the first ones of the split; None: all.
        batch_size: examples at once over all devices.
    """

    recipe: Text = "text_to_text"
    split: Literal["train", "validation", "test"] | None = None
    num_beams: PositiveInt = 1
    length_penalty: float = 1.0
    max_target_length: PositiveInt | None = None
    num_examples: PositiveInt | None = None
    batch_size: Annotated[PositiveInt, Placement()] = 64
    num_model_shards: Annotated[PositiveInt, Placement()] = 1


def code_modules(config: Config) -> list[str]:
    """The recipe, and every family: which one the checkpoint is of, no plan can know."""
    return [recipe_module(config.recipe), *map(find_module_name, FAMILIES)]


def run(context: StageContext, config: Config) -> StageOutputs:
    """Generate texts for a split."""
    from redco_flow.stages.prediction import predict

    return predict(context, config)
