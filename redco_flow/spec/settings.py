"""What of a stage's Config enters its fingerprint.

Everything but where and how fast: `resources` and fields marked `Placement` stay out, and a data
file counts by its name here, for its digest says the rest. The same setting gives the same
settings whether a file or the command line says it.
"""

from __future__ import annotations

from typing import Any

from redco_flow.spec.fields import marked
from redco_flow.spec.model import ContentOf, Placement
from redco_flow.spec.stage_kind import StageConfig


def settings_of(config: StageConfig) -> dict[str, Any]:
    """Return the Config as plain JSON values, without what does not determine the result."""
    settings = config.model_dump(mode="json")
    del settings["resources"]
    for path, _ in marked(config, Placement):
        if path[0] != "resources":
            del _holder(settings, path)[path[-1]]
    for path, file in marked(config, ContentOf):
        if file is not None:
            _holder(settings, path)[path[-1]] = file.rpartition("/")[2]
    return settings


def _holder(values: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    for part in path[:-1]:
        values = values[part]
    return values
