"""Which files of a model section lie on this machine: they are digested like data.

Knows file names, and what config.json calls the family; imports nothing heavy.
"""

from __future__ import annotations

from pathlib import Path

from redco_flow.records import read_json
from redco_flow.spec.pipeline import DataSection, ModelSection

_TOKENIZER_PATTERNS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "spiece.model",
)
_MODEL_PATTERNS = ("config.json", "model*.safetensors", "model.safetensors.index.json")


def tokenizer_source(model: ModelSection, data: DataSection) -> str | None:
    """Return the name or directory of the tokenizer to load; None where one is trained."""
    if data.tokenizer is None:
        return model.name_or_path
    return data.tokenizer.name_or_path


def tokenizer_files(model: ModelSection, data: DataSection) -> list[Path]:
    """Return the files of a tokenizer in a local directory; none for the hub's."""
    return _existing(tokenizer_source(model, data), _TOKENIZER_PATTERNS)


def model_files(model: ModelSection) -> list[Path]:
    """Return the files of a model in a local directory; none for the hub's."""
    patterns = ("config.json",) if model.from_scratch else _MODEL_PATTERNS
    return _existing(model.name_or_path, (*patterns, *_TOKENIZER_PATTERNS))


def family_in_files(model: ModelSection) -> str | None:
    """Return what a local directory's config.json calls its family; None where nothing does."""
    if model.name_or_path is None:
        return None
    try:
        values = read_json(Path(model.name_or_path).expanduser() / "config.json")
    except (OSError, ValueError):
        return None
    family = values.get("model_type") if isinstance(values, dict) else None
    return family if isinstance(family, str) else None


def _existing(name_or_path: str | None, patterns: tuple[str, ...]) -> list[Path]:
    if name_or_path is None:
        return []
    folder = Path(name_or_path).expanduser()
    found = {path for pattern in patterns for path in folder.glob(pattern)}
    return sorted(path.absolute() for path in found)
