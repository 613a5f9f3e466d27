"""Compare a model's number of positions with a dataset's longest texts, without JAX.

A plan knows the length that preprocessing cuts texts to; a training finds their real lengths.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from redco_flow.hub import config_in, is_commit, snapshot_folder
from redco_flow.local_paths import expanded, is_folder
from redco_flow.models.find import FAMILIES, find_config
from redco_flow.models.hub.model_files import CONFIG_FILE, model_type_of
from redco_flow.recipes.declared import DEFAULT_MAX_LENGTH
from redco_flow.recipes.find import find_recipe_if_any
from redco_flow.records import read_json
from redco_flow.spec.pipeline import ModelSection

_OF_SOURCES, _OF_TARGETS = "max_source_length", "max_target_length"


def length_problems(
    model: ModelSection, family: str | None, preprocessing: Any
) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield (path in the preprocessing's Config, message) of limits beyond the model's positions.

    Of the hub's models those are known whose `config.json` is in the cache at a pinned commit.

    Args:
        family: of the model; None where its `config.json` says it.
        preprocessing: the Config of the stage that encodes the data.
    """
    if family is None and model.name_or_path is not None:
        family = model_type_of(config_in(_folder_of(model)))
    core = _core_of(model, family) if family in FAMILIES else None
    for name in _lengths_of(preprocessing) if core is not None else ():
        limit, longest = getattr(preprocessing, name, None), _longest(core, name)
        if name == "max_length" and limit is None and hasattr(preprocessing, name):
            limit = DEFAULT_MAX_LENGTH
        if isinstance(limit, int) and limit > longest:
            yield (
                (name,),
                f"{limit} tokens, and the model's positions ({family}) reach {int(longest)}: lower "
                "it, or take a model with more",
            )


def longest_texts(model: ModelSection, family: str) -> tuple[float, float]:
    """Return the tokens of the longest source, or text, and target that a model reads.

    Infinity of a model without learned or stated positions, or whose configuration is not known.
    """
    core = _core_of(model, family)
    return _longest(core, _OF_SOURCES), _longest(core, _OF_TARGETS)


def _lengths_of(preprocessing: Any) -> Iterator[str]:
    """Yield the limits that cut something of what the recipe reads."""
    recipe = find_recipe_if_any(getattr(preprocessing, "recipe", ""))
    if recipe is not None and recipe.takes_conversations:
        yield "max_length"
        return
    if recipe is not None and recipe.is_of_rows:
        return  # the recipe's own settings cut its rows
    if getattr(getattr(preprocessing, "data", None), "text_key", None) is None:
        yield _OF_SOURCES
    if recipe is None or recipe.makes_texts:
        yield _OF_TARGETS


def _folder_of(model: ModelSection) -> Path:
    """The directory of a model's files, which may not be there."""
    folder = expanded(str(model.name_or_path))
    if not is_folder(folder) and is_commit(model.revision):
        return snapshot_folder("model", str(model.name_or_path), str(model.revision))
    return folder


def _core_of(model: ModelSection, family: str | None) -> Any:
    """The shape of a model that is given in full or whose `config.json` is here; else None."""
    config_type = find_config(str(family))
    try:
        if model.name_or_path is None:
            return config_type().updated(model.config).core
        values = read_json(_folder_of(model) / CONFIG_FILE)
        return config_type.from_hugging_face(values).updated(model.config).core
    except (OSError, ValueError, TypeError):
        return None  # what is wrong with the model is reported where it is read


def _longest(core: Any, name: str) -> float:
    """The longest source, target or whole text that the model reads."""
    if hasattr(core, "encoder"):
        core = core.decoder if name == _OF_TARGETS else core.encoder
    return float(getattr(getattr(core, "stack", core), "max_length", math.inf))
