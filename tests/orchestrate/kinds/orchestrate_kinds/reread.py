"""A stage kind that reads a checkpoint of `total` again."""

import json

from redco_flow.runtime.context import Output, StageContext, StageOutputs
from redco_flow.spec.stage_kind import InputSlot, StageConfig

SECTIONS = ()
INPUTS = {"checkpoint": InputSlot(kind="checkpoint")}
OUTPUTS = {"predictions": "predictions"}


class Config(StageConfig):
    """Nothing to set."""


def run(context: StageContext, config: Config) -> StageOutputs:
    """Say what stands in it."""
    total = json.loads((context.input("checkpoint").path / "checkpoint.json").read_text())["total"]
    path = context.work_dir / "total.json"
    path.write_text(json.dumps(total))
    return StageOutputs({"predictions": Output("predictions", path)}, {"reread": total})
