"""A dataset in, checkpoints out: the last ones and the best by each metric."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from redco_flow.spec.model import (
    Fraction,
    NonNegativeInt,
    Placement,
    PositiveFloat,
    PositiveInt,
    StrictModel,
)
from redco_flow.spec.pipeline import ModelSection
from redco_flow.spec.stage_kind import InputSlot, StageConfig

SECTIONS = ("recipe", "model")
INPUTS = {"dataset": InputSlot(kind="dataset")}
OUTPUTS = {"checkpoint": "checkpoint"}


class Schedule(StrictModel):
    type: Literal["linear", "cosine", "constant"] = "linear"
    warmup_ratio: Fraction = 0.0


class Keep(StrictModel):
    last: NonNegativeInt = 1
    best: list[str] = Field(default_factory=list)


class Config(StageConfig):
    recipe: str
    model: ModelSection
    learning_rate: PositiveFloat
    num_epochs: PositiveInt = 1
    global_batch_size: PositiveInt = 8
    schedule: Schedule = Schedule()
    keep: Keep = Keep()
    num_model_shards: Annotated[PositiveInt, Placement()] = 1
    shuffle: bool = True


def output_names(config: Config) -> list[str]:
    last = ["checkpoint/last"] if config.keep.last else []
    return [*last, *(f"checkpoint/best/{metric}" for metric in config.keep.best)]


def run(context, config):
    raise AssertionError("loading a pipeline runs nothing")
