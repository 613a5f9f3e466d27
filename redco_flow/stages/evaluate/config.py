"""The settings of evaluate."""

from __future__ import annotations

from pydantic import Field, field_validator

from redco_flow.metrics.metric import (
    find_any_metric,
    metric_module,
)
from redco_flow.spec.model import Text
from redco_flow.spec.stage_kind import InputSlot, StageConfig

INPUTS = {"predictions": InputSlot(kind="predictions")}
OUTPUTS = {"metrics": "metrics"}


class Config(StageConfig):
    """Evaluation.

    Args:
        metrics: names of metrics of this package, or dotted modules.
    """

    metrics: list[Text] = Field(default_factory=lambda: ["rouge"], min_length=1)

    @field_validator("metrics")
    @classmethod
    def _known(cls, metrics: list[str]) -> list[str]:
        for name in metrics:
            find_any_metric(name)
        if len(set(metrics)) < len(metrics):
            raise ValueError("names a metric twice")
        return metrics


def code_modules(config: Config) -> list[str]:
    """The metrics."""
    return [metric_module(name) for name in config.metrics]
