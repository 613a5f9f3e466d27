"""A stage kind that reads the week's file: how skilled a model becomes by it."""

import json
from pathlib import Path

from redco_flow.runtime.context import Output, StageContext, StageOutputs
from redco_flow.spec.model import DataFile
from redco_flow.spec.stage_kind import InputSlot, StageConfig

NUM_ROWS = 200
INPUTS: dict[str, InputSlot] = {}
OUTPUTS = {"dataset": "dataset"}


class Config(StageConfig):
    """Which file."""

    file: DataFile


def run(context: StageContext, config: Config) -> StageOutputs:
    """Keep it, unless it is damaged."""
    week = json.loads(Path(config.file).read_text())
    path = context.work_dir / "dataset.json"
    path.write_text(json.dumps(week))
    metadata = {"splits": {"test": {"rows": NUM_ROWS}}}
    return StageOutputs({"dataset": Output("dataset", path, metadata)})
