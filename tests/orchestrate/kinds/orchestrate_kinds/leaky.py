"""A stage kind that prints a file that it should not, and fails with it in its words."""

from pathlib import Path
from typing import Annotated

from redco_flow.runtime.context import StageContext, StageOutputs
from redco_flow.spec.model import Placement
from redco_flow.spec.stage_kind import StageConfig

SECTIONS = ()
INPUTS = {}
OUTPUTS = {"dataset": "dataset"}


class Config(StageConfig):
    """The file."""

    file: Annotated[str, Placement()]


def code_modules(config):
    """Its own source."""
    return ["orchestrate_kinds.leaky"]


def run(context: StageContext, config: Config) -> StageOutputs:
    """Print, and fail."""
    text = Path(config.file).read_text()
    print(text, flush=True)
    print(repr(text), flush=True)
    raise RuntimeError(f"the server refused {text}")
