"""Which files of a model's directory are read: one list for downloads, fingerprints and loading."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from redco_flow.engine.files import read_json

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
CONFIG_FILES = (CONFIG_FILE, GENERATION_FILE)
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# What a download takes of a model's parameters: no other framework's, and no second copy of them.
WEIGHT_PATTERNS = ("model*.safetensors", INDEX_FILE)
# Of four bits, as gpt-oss is published.
_READ_QUANTIZATIONS = ("mxfp4",)


def model_type_of(config: Any) -> str:
    """Return the family that a config.json's content names; empty where it names none."""
    found = config.get("model_type") if isinstance(config, Mapping) else None
    return found.replace("-", "_") if isinstance(found, str) else ""


def quantization_method(config: Any) -> str:
    """Return the method by which weights are quantized that are not read here; empty: none.

    Args:
        config: a config.json's content, or what the hub says of it.
    """
    if not isinstance(config, Mapping):
        return ""
    stated = config.get("quantization_config") or config.get("compression_config")
    if not stated:
        return ""
    values = stated if isinstance(stated, Mapping) else {}
    method = str(values.get("quant_method") or "")
    if not method and any("load_in_" in str(key) for key in values):
        method = "bitsandbytes"  # as its first repositories write it
    return "" if method in _READ_QUANTIZATIONS else method or "of an unnamed method"


def quantization_problem(method: str) -> str:
    """Say why a model quantized by a method is not read, and what to do."""
    return (
        f"has quantized parameters ({method}, by quantization_config in its config.json), which "
        f"are read of {', '.join(_READ_QUANTIZATIONS)} alone: name the repository that it was "
        "quantized from, or load it with transformers, call dequantize() where the method has it, "
        "save_pretrained into a directory, and name that."
    )


def weight_names(folder: Path) -> Sequence[str]:
    """Return the names of the safetensors files that a model's parameters are read from.

    As transformers does: a single file counts before an index. Whether the files are there is not
    looked at.

    Raises:
        ValueError: the index is damaged, or names a file outside of the directory.
    """
    index = folder / INDEX_FILE
    if (folder / SINGLE_FILE).is_file() or not index.is_file():
        return [SINGLE_FILE]
    record = read_json(index)
    places = record.get("weight_map") if isinstance(record, dict) else None
    names = list(places.values()) if isinstance(places, dict) else []
    if not names or not all(isinstance(name, str) and name for name in names):
        raise ValueError(
            f"{index}: not an index of safetensors files: weight_map must name the file of each "
            "tensor."
        )
    outside = sorted({name for name in names if Path(name).name != name or "\0" in name})
    if outside:
        raise ValueError(
            f"{index}: names files that are not in its directory: {', '.join(map(repr, outside))}."
        )
    return sorted(set(names))


def has_weights(folder: Path) -> bool:
    """Tell whether a directory has a model's safetensors, every one that its index names."""
    try:
        return all((folder / name).is_file() for name in weight_names(folder))
    except (OSError, ValueError):
        return False


def weight_files(folder: Path) -> list[Path]:
    """Return the files that a model's parameters are read from, as far as they are there."""
    try:
        names = weight_names(folder)
    except (OSError, ValueError):
        names = []
    named = [folder / name for name in names]
    index = [] if named == [folder / SINGLE_FILE] else [folder / INDEX_FILE]
    return [path for path in (*index, *named) if path.is_file()]
