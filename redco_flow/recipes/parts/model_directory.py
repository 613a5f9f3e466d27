"""Find the directory of a model by a path or a hub id; download it first where it is on the hub."""

from __future__ import annotations

from pathlib import Path

from redco_flow.hub import download_model, is_hub_name
from redco_flow.local_paths import expanded, is_folder
from redco_flow.models.hub.model_files import (
    CONFIG_FILE,
    CONFIG_FILES,
    WEIGHT_PATTERNS,
    has_weights,
)


def find_checkpoint(
    name_or_path: str, *, revision: str | None = None, with_weights: bool = True
) -> Path:
    """Return the directory of a model, downloading it first where it is a hub id.

    Args:
        revision: the hub's branch, tag or commit; None means main.
        with_weights: False needs the configuration alone.

    Raises:
        ValueError: neither a directory with a config.json nor a model that the hub, or its local
            cache, has.
    """
    path = expanded(name_or_path)
    if is_folder(path):
        if not (path / CONFIG_FILE).is_file():
            raise ValueError(f"model directory {path} has no {CONFIG_FILE}.")
        return path
    if not is_hub_name(name_or_path):
        raise ValueError(f"model directory {name_or_path} does not exist.")
    patterns = [*CONFIG_FILES, *(WEIGHT_PATTERNS if with_weights else ())]

    def is_whole(folder: Path) -> bool:
        return (folder / CONFIG_FILE).is_file() and (not with_weights or has_weights(folder))

    return download_model(name_or_path, revision, patterns, is_whole)
