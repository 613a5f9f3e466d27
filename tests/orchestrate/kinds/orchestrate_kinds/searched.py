"""A stage kind that leaves settings to a search, as a training leaves its mesh."""

from typing import Annotated, Literal

from redco_flow.runtime.context import StageContext, StageOutputs
from redco_flow.spec.model import Placement
from redco_flow.spec.stage_kind import StageConfig

SECTIONS, INPUTS, OUTPUTS = (), {}, {}


class Config(StageConfig):
    """What is left to the search."""

    mesh: Annotated[Literal["auto"] | None, Placement()] = None


def searched_settings(config: Config) -> dict[str, tuple[str, ...]]:
    """Return what `mesh: auto` stands for."""
    return {} if config.mesh is None else {"mesh": ("num_shards",)}


def run(context: StageContext, config: Config) -> StageOutputs:
    """Make nothing."""
    return StageOutputs({})
