"""The settings of compare."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from redco_flow.spec.metric import (
    metric_module,
    metric_names,
)
from redco_flow.spec.model import NonNegativeInt
from redco_flow.spec.stage_kind import InputSlot, StageConfig

INPUTS = {"metrics": InputSlot(kind="metrics", many=True)}
OUTPUTS = {"metrics": "metrics"}


class Config(StageConfig):
    """Comparison.

    Args:
        num_resamples: draws of the bootstrap; p-values are no finer than one over this.
        confidence: of the intervals.
        seed: of the draws.
    """

    num_resamples: Annotated[int, Field(ge=100)] = 10_000
    confidence: Annotated[float, Field(gt=0, lt=1)] = 0.95
    seed: NonNegativeInt = 0


def code_modules(config: Config) -> list[str]:
    """Any metric may have made the evaluations."""
    return [metric_module(name) for name in metric_names()]
