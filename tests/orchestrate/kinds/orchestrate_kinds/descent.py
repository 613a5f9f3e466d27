"""A stage kind that logs a validation loss after each step, and keeps its step as a checkpoint."""

import json
import time
from pathlib import Path
from typing import Annotated

from orchestrate_kinds.gate import note_execution
from redco_flow.runtime.context import Output, StageContext, StageOutputs
from redco_flow.spec.model import Placement, PositiveFloat, PositiveInt
from redco_flow.spec.stage_kind import StageConfig

SECTIONS = ()
INPUTS = {}
OUTPUTS = {"checkpoint": "checkpoint"}


class Config(StageConfig):
    """The loss of the first step; a folder of files to wait for and to write."""

    loss: PositiveFloat = 1.0
    steps: PositiveInt = 4
    folder: Annotated[str, Placement()]


def output_names(config):
    """The only one."""
    return list(OUTPUTS)


def code_modules(config):
    """Its own source."""
    return ["orchestrate_kinds.descent"]


def logged_metrics(config):
    """The loss after each step."""
    return {"val/loss": "min"}


def run(context: StageContext, config: Config) -> StageOutputs:
    """Step, save, log; after each step wait for the file `go-LOSS` or `go`."""
    folder, saved = Path(config.folder), context.work_dir / "checkpoint.json"
    step = json.loads(saved.read_text())["total"] if saved.exists() else 0
    note_execution(folder / f"from-{step}-{config.loss}", context)
    while step < config.steps:
        step += 1
        saved.write_text(json.dumps({"total": step}))
        context.report(phase="training", step=step)
        record = {"kind": "evaluation", "step": step, "metrics": {"loss": config.loss / step}}
        context.log_metrics(record)
        while not any((folder / name).exists() for name in ("go", f"go-{config.loss}")):
            if context.stop_requested():
                _wait_while_held(folder)
            context.raise_if_stopped()
            time.sleep(0.05)
    return StageOutputs({"checkpoint": Output("checkpoint", saved, {"step": step})}, {"loss": 1.0})


def _wait_while_held(folder: Path) -> None:
    """Write that the stop has come, and take long to stop while the file `hold` is there."""
    (folder / "stopping").touch()
    while (folder / "hold").exists():
        time.sleep(0.05)
