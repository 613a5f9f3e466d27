"""A stage kind that reads a model and rows, and always fails."""

from pathlib import Path
from typing import Annotated

from redco_flow.runtime.context import StageContext, StageOutputs
from redco_flow.spec.model import DataFile, Placement
from redco_flow.spec.pipeline import ModelSection
from redco_flow.spec.stage_kind import StageConfig

SECTIONS = ("model",)
INPUTS = {}
OUTPUTS = {"checkpoint": "checkpoint"}


class Config(StageConfig):
    """A model, rows, and the model's files that are digested; empty: none is."""

    model: ModelSection
    rows: DataFile
    digested: Annotated[tuple[str, ...], Placement()] = ()


def code_modules(config):
    """Its own source."""
    return ["orchestrate_kinds.tuned"]


def data_files(config):
    """The rows, and of the model what is named."""
    folder = Path(config.model.name_or_path)
    return [Path(config.rows), *(folder / name for name in config.digested)]


def run(context: StageContext, config: Config) -> StageOutputs:
    """Fail."""
    raise RuntimeError("the model does not learn")
