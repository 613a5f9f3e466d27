"""A dataset and a checkpoint in, predictions out."""

from __future__ import annotations

from redco_flow.spec.model import PositiveInt
from redco_flow.spec.stage_kind import InputSlot, StageConfig

SECTIONS = ("recipe",)
INPUTS = {
    "dataset": InputSlot(kind="dataset"),
    "checkpoint": InputSlot(kind="checkpoint", default_selector="last"),
}
OUTPUTS = {"predictions": "predictions"}


class Config(StageConfig):
    recipe: str
    num_beams: PositiveInt = 1


def run(context, config):
    raise AssertionError("loading a pipeline runs nothing")
