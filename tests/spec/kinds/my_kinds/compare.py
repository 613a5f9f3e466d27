"""Several metrics in, one comparison out."""

from __future__ import annotations

from redco_flow.spec.model import PositiveInt
from redco_flow.spec.stage_kind import InputSlot, StageConfig

INPUTS = {"scores": InputSlot(kind="metrics", many=True)}
OUTPUTS = {"metrics": "metrics"}


class Config(StageConfig):
    num_samples: PositiveInt = 1000


def run(context, config):
    raise AssertionError("loading a pipeline runs nothing")
