"""A stage kind whose checkpoint says how many rows it gets right."""

import json
import time
from pathlib import Path
from typing import Annotated

from redco_flow.runtime.context import Output, StageContext, StageOutputs
from redco_flow.spec.model import Placement
from redco_flow.spec.stage_kind import InputSlot, StageConfig

INPUTS = {"dataset": InputSlot(kind="dataset")}
OUTPUTS = {"checkpoint": "checkpoint"}


class Config(StageConfig):
    """A file that a slow week waits for, if that is named."""

    gate: Annotated[str | None, Placement()] = None


def output_names(config: Config) -> list[str]:
    """All of them."""
    return list(OUTPUTS)


def run(context: StageContext, config: Config) -> StageOutputs:
    """Become as skilled as the week's file says; a bad week fails."""
    week = json.loads(next(context.input("dataset").path.glob("*.json")).read_text())
    while week.get("is_slow") and config.gate and not Path(config.gate).exists():
        context.raise_if_stopped()
        time.sleep(0.05)
    if week["skill"] is None:
        raise RuntimeError("the loss is not a number")
    path = context.work_dir / "weights.json"
    path.write_text(json.dumps(week))
    return StageOutputs({"checkpoint": Output("checkpoint", path, {"step": 1})})
