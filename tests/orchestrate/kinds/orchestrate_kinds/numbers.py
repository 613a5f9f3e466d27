"""A stage kind that writes a list of numbers: what preprocessing is to a training."""

import json
from pathlib import Path
from typing import Annotated

from orchestrate_kinds.gate import note_execution, pass_gate
from redco_flow.runtime.context import Output, StageContext, StageOutputs
from redco_flow.spec.model import DataFile, Placement, PositiveInt
from redco_flow.spec.stage_kind import StageConfig

SECTIONS = ()
INPUTS = {}
OUTPUTS = {"dataset": "dataset"}


class Config(StageConfig):
    """How many numbers, or a file of them."""

    count: PositiveInt = 3
    file: DataFile | None = None
    executions: Annotated[str | None, Placement()] = None
    gate: Annotated[str | None, Placement()] = None


def code_modules(config):
    """Its own source."""
    return ["orchestrate_kinds.numbers"]


def run(context: StageContext, config: Config) -> StageOutputs:
    """Write the numbers."""
    note_execution(config.executions, context)
    print(f"writing {config.count} numbers", flush=True)
    pass_gate(config.gate, context)
    numbers = list(range(1, config.count + 1))
    if config.file:
        numbers = json.loads(Path(config.file).read_text())
    path = context.work_dir / "numbers.json"
    path.write_text(json.dumps(numbers))
    return StageOutputs({"dataset": Output("dataset", path)})
