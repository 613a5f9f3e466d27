"""The settings of parameter_digests."""

from __future__ import annotations

from redco_flow.models.find import FAMILIES, find_module_name
from redco_flow.recipes.find import recipe_module
from redco_flow.spec.model import Text
from redco_flow.spec.stage_kind import InputSlot, StageConfig

SECTIONS = ("recipe",)
INPUTS = {"checkpoint": InputSlot(kind="checkpoint", default_selector="last")}
OUTPUTS = {"metrics": "metrics"}


class Config(StageConfig):
    """Nothing to be set but which checkpoint, and the recipe that made it.

    Args:
        recipe: the checkpoint's; the pipeline's own where the stage does not say it.
    """

    recipe: Text = "text_to_text"


def code_modules(config: Config) -> list[str]:
    """The recipe, and every family: which one the checkpoint is of, no plan can know."""
    return [recipe_module(config.recipe), *map(find_module_name, FAMILIES)]
