"""promote: a checkpoint and evaluations in, the request to promote it out.

Whether it is promoted is decided by the launcher when the request stands, for aliases move while
jobs run, and a job may run where the workspace is not: see `conclude` in `config`.
"""

from __future__ import annotations

from redco_flow.records import write_json
from redco_flow.runtime.context import Output, StageContext, StageOutputs
from redco_flow.stages.promote.config import Config

REQUEST_FILE = "promotion.json"


def run(context: StageContext, config: Config) -> StageOutputs:
    """Write down what is asked for."""
    request = {
        "format": 1,
        "checkpoint": context.input("checkpoint").id,
        "metrics": [one.id for one in context.inputs["metrics"]],
        **config.model_dump(mode="json", exclude={"resources"}),
    }
    path = context.work_dir / REQUEST_FILE
    write_json(path, request)
    return StageOutputs({"promotion": Output("promotion", path, request)})
