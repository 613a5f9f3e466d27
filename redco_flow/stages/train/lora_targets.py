"""Check at plan time, by names alone and without JAX, that `lora.targets` match kernels."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from redco_flow.bounded import search_problem
from redco_flow.local_paths import expanded, is_folder
from redco_flow.models.find import find_config
from redco_flow.models.hub.layouts import TensorLayout
from redco_flow.models.hub.model_files import CONFIG_FILE
from redco_flow.models.hub.module_names import ALL_LINEAR, find_targets, flat_layouts
from redco_flow.records import read_json
from redco_flow.spec.pipeline import ModelSection

_PLAIN_NAME = re.compile(r"[\w.-]+")  # takes no time to search
# What a model may have or not; which it is, its files say.
_HEADS = ("has_head", "has_pooler", "has_classifier")
_LABELS = TensorLayout(
    "model labels", "labels model", "classifier.weight", aliases=("score.weight",)
)


def targets_problem(
    targets: str | list[str], family: str, model: ModelSection, *, has_labels: bool
) -> str | None:
    """Say which targets match nothing; None where all match, or the model is not here to ask.

    Args:
        family: one of ours.
        has_labels: whether the recipe gives the model a head of labels.
    """
    try:
        config = _config(family, model)
    except (OSError, ValueError):  # reported for itself, or read when the stage runs
        return None
    if config is None:
        return None
    layouts = flat_layouts(config.tensor_layouts())
    if has_labels:
        layouts["classifier/kernel"] = _LABELS
    entries = [targets] if isinstance(targets, str) else targets
    patterns = [entry for entry in entries if not _PLAIN_NAME.fullmatch(entry)]
    names = [*layouts, *(one.name for one in layouts.values())]
    if patterns and (problem := search_problem(patterns, names)):
        return problem
    try:
        found = find_targets(targets, layouts, renamings=config.module_renamings)
    except ValueError as error:
        return str(error)
    if found.pattern == ALL_LINEAR:
        return None
    chosen = {path for path in layouts if found.pattern and re.search(found.pattern, path)}
    if has_labels and all(path.startswith("classifier/") for path in chosen | {*found.modules}):
        return (
            f"{', '.join(entries)} means only the head of labels, which is trained in full anyway: "
            f"name modules of the model too, or {ALL_LINEAR}"
        )
    return None


def _config(family: str, model: ModelSection) -> Any:
    """Return the model's configuration, with all heads; None where it is not here."""
    kind = find_config(family)
    config = kind()
    if model.name_or_path is not None:
        values = _config_values(model)
        if values is None:
            return None
        config = kind.from_hugging_face(values)
    heads = {name: True for name in _HEADS if hasattr(config, name)}
    return config.updated({**model.config, **heads})


def _config_values(model: ModelSection) -> Mapping[str, Any] | None:
    """Return the content of the model's config.json, of a hub's where the cache has it."""
    assert model.name_or_path is not None
    folder = expanded(model.name_or_path)
    if not is_folder(folder):
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(model.name_or_path, CONFIG_FILE, revision=model.revision)
        if not isinstance(found, str):
            return None
        folder = Path(found).parent
    values = read_json(folder / CONFIG_FILE)
    return values if isinstance(values, dict) else None
