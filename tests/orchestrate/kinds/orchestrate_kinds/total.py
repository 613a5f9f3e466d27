"""A stage kind that adds numbers up and makes a metric of them: training and scoring at once."""

import json
from pathlib import Path
from typing import Annotated

from orchestrate_kinds.gate import note_execution, pass_gate
from redco_flow.runtime.context import Output, StageContext, StageOutputs
from redco_flow.spec.model import Placement, PositiveFloat
from redco_flow.spec.stage_kind import InputSlot, StageConfig

SECTIONS = ()
INPUTS = {"dataset": InputSlot(kind="dataset")}
OUTPUTS = {"metrics": "metrics", "checkpoint": "checkpoint"}
BASELINES = {"most_frequent_target": {"text": "0.5", "metrics": {"total": 0.5}}}
METADATA = {"baselines": BASELINES, "directions": {"total": "max"}}


class Config(StageConfig):
    """What the sum is multiplied by; whether to fail."""

    learning_rate: PositiveFloat = 1e-4
    fails_until: Annotated[str | None, Placement()] = None
    executions: Annotated[str | None, Placement()] = None
    gate: Annotated[str | None, Placement()] = None


def output_names(config: Config) -> list[str]:
    """All of them, so that who asks for its last checkpoint gets the only one."""
    return list(OUTPUTS)


def run(context: StageContext, config: Config) -> StageOutputs:
    """Add them up."""
    note_execution(config.executions, context)
    print(f"learning rate {config.learning_rate}", flush=True)
    pass_gate(config.gate, context)
    if config.fails_until and not Path(config.fails_until).exists():
        raise RuntimeError("the sum does not converge")
    numbers = json.loads((context.input("dataset").path / "numbers.json").read_text())
    total = sum(numbers) * config.learning_rate
    checkpoint = context.work_dir / "checkpoint.json"
    checkpoint.write_text(json.dumps({"total": total}))
    metrics = context.work_dir / "metrics.json"
    metrics.write_text(json.dumps({"total": total}))
    return StageOutputs(
        {
            "checkpoint": Output("checkpoint", checkpoint, {"step": len(numbers)}),
            "metrics": Output("metrics", metrics, METADATA),
        },
        {"total": total},
    )
