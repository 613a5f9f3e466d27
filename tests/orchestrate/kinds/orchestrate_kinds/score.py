"""A stage kind that takes any number of metrics and reports the largest total."""

import json

from redco_flow.runtime.context import Output, StageContext, StageOutputs
from redco_flow.spec.stage_kind import InputSlot, StageConfig

SECTIONS = ()
INPUTS = {"metrics": InputSlot(kind="metrics", many=True)}
OUTPUTS = {"predictions": "predictions"}


class Config(StageConfig):
    """Nothing to set."""


def run(context: StageContext, config: Config) -> StageOutputs:
    """Compare."""
    totals = [
        json.loads((one.path / "metrics.json").read_text())["total"]
        for one in context.inputs["metrics"]
    ]
    path = context.work_dir / "best.json"
    path.write_text(json.dumps(max(totals)))
    return StageOutputs({"predictions": Output("predictions", path)}, {"best": max(totals)})
