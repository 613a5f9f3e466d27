"""A stage kind that may begin with a checkpoint."""

from redco_flow.runtime.context import StageContext, StageOutputs
from redco_flow.spec.stage_kind import InputSlot, StageConfig

INPUTS = {
    "dataset": InputSlot(kind="dataset"),
    "start_from": InputSlot(kind="checkpoint", default_selector="last", is_optional=True),
}
OUTPUTS = {"checkpoint": "checkpoint"}


class Config(StageConfig):
    """Nothing to set."""


def run(context: StageContext, config: Config) -> StageOutputs:
    """Make nothing: it is only planned."""
    return StageOutputs({})
