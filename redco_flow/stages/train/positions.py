"""Compare a model's number of positions with a dataset's longest texts, without JAX.

A plan knows the length that preprocessing cuts texts to; a training finds their real lengths.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from redco_flow.local_paths import expanded
from redco_flow.models.find import FAMILIES, find_config
from redco_flow.records import read_json
from redco_flow.spec.pipeline import ModelSection

_OF_SOURCES, _OF_TARGETS = "max_source_length", "max_target_length"
LENGTHS = (_OF_SOURCES, _OF_TARGETS, "max_length")


def length_problems(
    model: ModelSection, family: str | None, preprocessing: Any
) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield (path in the preprocessing's Config, message) of limits beyond the model's positions.

    Args:
        family: of the model; None where it is not known before it is downloaded.
        preprocessing: the Config of the stage that encodes the data.
    """
    core = _core_of(model, family) if family in FAMILIES else None
    for name in LENGTHS if core is not None else ():
        limit, longest = getattr(preprocessing, name, None), _longest(core, name)
        if isinstance(limit, int) and limit > longest:
            yield (
                (name,),
                f"{limit} tokens, and the model's positions ({family}) reach {int(longest)}: lower "
                "it, or take a model with more",
            )


def _core_of(model: ModelSection, family: str | None) -> Any:
    """The shape of a model that is given in full or lies in a local directory; else None."""
    config_type = find_config(str(family))
    try:
        if model.name_or_path is None:
            return config_type().updated(model.config).core
        values = read_json(expanded(model.name_or_path) / "config.json")
        return config_type.from_hugging_face(values).updated(model.config).core
    except (OSError, ValueError, TypeError):
        return None  # what is wrong with the model is reported where it is read


def _longest(core: Any, name: str) -> float:
    """The longest source, target or whole text that the model reads."""
    if hasattr(core, "encoder"):
        core = core.decoder if name == _OF_TARGETS else core.encoder
    return float(getattr(getattr(core, "stack", core), "max_length", math.inf))
