"""The digests that every metrics record of a stage carries."""

from __future__ import annotations

from dataclasses import dataclass

from redco_flow.records import digest_json
from redco_flow.runtime.context import StageContext
from redco_flow.spec.stage_kind import StageConfig


@dataclass(frozen=True)
class Provenance:
    """What every record of a stage names.

    Args:
        data: id of the dataset artifact.
        config: digest of the stage's settings.
    """

    data: str
    config: str


def provenance_of(context: StageContext, config: StageConfig, *, data: str) -> Provenance:
    """Return what the records of a stage name."""
    planned = context.provenance.get("config_digest")
    return Provenance(data, planned or digest_json(config.model_dump(mode="json")))
