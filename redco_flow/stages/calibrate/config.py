"""The settings of calibrate."""

from __future__ import annotations

from pydantic import Field

from redco_flow.spec.model import PositiveInt
from redco_flow.spec.stage_kind import StageConfig

OUTPUTS = {"metrics": "metrics"}
SPEEDS_FILE = "speeds.json"


class Config(StageConfig):
    """Sizes of the operations that are timed on the devices of one host.

    Args:
        product_sizes: rows of the square matrices that are multiplied.
        copy_mib: sizes of the arrays that a device copies in its memory.
        exchange_mib: sizes of what each device has of the arrays that they exchange.
    """

    product_sizes: list[PositiveInt] = Field(default_factory=lambda: [2048, 4096, 8192])
    copy_mib: list[PositiveInt] = Field(default_factory=lambda: [64, 512, 2048])
    exchange_mib: list[PositiveInt] = Field(default_factory=lambda: [4, 64, 512])
