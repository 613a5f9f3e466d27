"""Fetch a tokenizer by name or directory, and tell whether a model's own made the data.

A model that reads ids of another tokenizer trains without an error and learns nonsense. Imports
transformers when asked, for only it knows every published tokenizer.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from redco_flow.errors import RedcoFlowError
from redco_flow.hub import (
    download_model,
    has_tokenizer,
    is_hub_name,
    model_type_in,
    whole_download,
)
from redco_flow.local_paths import expanded, is_folder
from redco_flow.records import reading
from redco_flow.spec.pipeline import DataSection, ModelSection
from redco_flow.text.chat import TOKENIZER_DEFAULT
from redco_flow.text.tokenizer import TextTokenizer

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


def template_files(model: ModelSection, data: DataSection) -> list[Path]:
    """Return the files of a chat template, beside a local tokenizer or of its own."""
    name = data.chat_template
    if name is not None and name != TOKENIZER_DEFAULT:
        return [Path(name)] if name.endswith(".jinja") else []
    return _existing(tokenizer_source(model, data), ("chat_template.jinja",))


def model_files(model: ModelSection) -> list[Path]:
    """Return the files of a model in a local directory; none for the hub's."""
    patterns = ("config.json",) if model.from_scratch else _MODEL_PATTERNS
    return _existing(model.name_or_path, (*patterns, *_TOKENIZER_PATTERNS))


def family_in_files(model: ModelSection) -> str | None:
    """Return what a local directory's config.json calls its family; None where nothing does."""
    if model.name_or_path is None:
        return None
    return model_type_in(expanded(model.name_or_path)) or None


def _existing(name_or_path: str | None, patterns: tuple[str, ...]) -> list[Path]:
    if name_or_path is None:
        return []
    folder = expanded(name_or_path)
    found = {path for pattern in patterns for path in folder.glob(pattern)}
    return sorted(path.absolute() for path in found)


# What AutoTokenizer may read, of fast and of slow tokenizers.
_TOKENIZER_FILES = ("*.json", "*.model", "*.txt", "*.tiktoken", "*.jinja")
_OF_A_PLACE = ("name_or_path", "is_local", "local_files_only")


class WrongTokenizer(RedcoFlowError):
    """The data's token ids are not those that the model knows."""


def save_pretrained_tokenizer(
    name_or_path: str,
    directory: Path,
    *,
    revision: str | None = None,
    chat_template: str | None = None,
) -> None:
    """Load a tokenizer and save it, the same bytes wherever it was loaded from.

    Args:
        chat_template: takes the place of the tokenizer's own.
        revision: the hub's branch, tag or commit; None means main.

    Raises:
        ValueError: there is none of that name, or it has no tokenizer.json.
    """
    from transformers import AutoTokenizer

    folder = _find_tokenizer(name_or_path, revision)
    try:
        with reading(folder, "a tokenizer"):
            tokenizer = AutoTokenizer.from_pretrained(
                str(folder), use_fast=True, trust_remote_code=False
            )
    except (OSError, ValueError) as error:
        raise ValueError(f"the tokenizer '{name_or_path}' cannot be loaded: {error}") from error
    if not tokenizer.is_fast:
        raise ValueError(f"the tokenizer '{name_or_path}' has no tokenizer.json (no fast version).")
    for key in _OF_A_PLACE:
        tokenizer.init_kwargs.pop(key, None)
    tokenizer.name_or_path = ""
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(directory)


def _find_tokenizer(name_or_path: str, revision: str | None) -> Path:
    """The directory of a tokenizer's files, downloaded where the name is a hub id."""
    path = expanded(name_or_path)
    if is_folder(path) or not is_hub_name(name_or_path):
        return path

    def is_whole(folder: Path) -> bool:
        is_listed = whole_download("model", name_or_path, folder.name, _TOKENIZER_FILES) is not None
        return has_tokenizer(folder) or is_listed  # a model may have none

    return download_model(name_or_path, revision, _TOKENIZER_FILES, is_whole)


def check_model_tokenizer(model: ModelSection, data_tokenizer: TextTokenizer) -> None:
    """Refuse data that was encoded with another tokenizer than the pretrained model's.

    A model without one of its own, or one that starts from scratch, takes the data's.

    Raises:
        WrongTokenizer: they differ; the message has both digests and what to do.
    """
    name = model.name_or_path
    if name is None or model.from_scratch:
        return
    found = _find_tokenizer(name, model.revision)
    is_local = is_folder(expanded(name))
    if not (tokenizer_files(model, DataSection()) if is_local else has_tokenizer(found)):
        return
    with tempfile.TemporaryDirectory(prefix="redco-flow-tokenizer-") as folder:
        save_pretrained_tokenizer(name, Path(folder), revision=model.revision)
        own = TextTokenizer.load(Path(folder))
    if own.digest != data_tokenizer.digest:
        raise WrongTokenizer(
            f"the data was encoded with another tokenizer (digest {data_tokenizer.digest[:12]}, "
            f"{data_tokenizer.vocab_size} tokens) than that of the model '{name}' (digest "
            f"{own.digest[:12]}, {own.vocab_size} tokens). Preprocess with the model's: leave "
            "data.tokenizer out; or start anew with model.from_scratch: true."
        )
