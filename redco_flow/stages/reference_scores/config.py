"""The settings of reference_scores."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Annotated

from redco_flow.models.find import FAMILIES, find_module_name
from redco_flow.recipes.find import RecipeName, recipe_module
from redco_flow.spec.model import Placement, PositiveInt
from redco_flow.spec.pipeline import ModelSection
from redco_flow.spec.stage_kind import InputSlot, StageConfig
from redco_flow.stages.artifacts.tokenizer import model_files
from redco_flow.stages.device_layout import layout_problems

SECTIONS = ("recipe", "model")
INPUTS = {
    "dataset": InputSlot(kind="dataset"),
    "checkpoint": InputSlot(kind="checkpoint", default_selector="last", is_optional=True),
}
OUTPUTS = {"reference_scores": "reference_scores"}
SEVERAL_PROCESSES = True


class Config(StageConfig):
    """Log-probabilities of the reference, which a preference training compares with.

    Args:
        recipe: the pipeline's own where the stage does not say it.
        model: the pipeline's section of this name: its `name_or_path` is the reference where the
            stage takes no checkpoint.
        batch_size: pairs at once over all devices.
        num_model_shards: devices that split every product among them.
        fsdp: data-parallel devices that share one copy of the parameters as they are loaded.
    """

    recipe: RecipeName = "preference"
    model: ModelSection = ModelSection()
    batch_size: Annotated[PositiveInt, Placement()] = 32
    num_model_shards: Annotated[PositiveInt, Placement()] = 1
    fsdp: Annotated[PositiveInt, Placement()] = 1


def input_problems(config: Config, given: Collection[str]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield that there is no reference."""
    starts_anew = config.model.name_or_path is None or config.model.from_scratch
    if "checkpoint" not in given and starts_anew:
        yield (
            ("model",),
            "there is no reference: give the stage a `checkpoint`, or model.name_or_path",
        )


def device_problems(config: Config, num_devices: int) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield which settings this number of devices cannot have."""
    return layout_problems(config, num_devices)


def code_modules(config: Config) -> list[str]:
    """The recipe, and every family: which one the checkpoint is of, no plan can know."""
    return [recipe_module(config.recipe), *map(find_module_name, FAMILIES)]


def data_files(config: Config) -> list[Path]:
    """The files of a model that lies in a local directory."""
    return model_files(config.model)
