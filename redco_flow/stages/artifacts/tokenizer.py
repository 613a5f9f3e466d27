"""Fetch a tokenizer by name or directory, and tell whether a model's own made the data.

A model that reads ids of another tokenizer trains without an error and learns nonsense. Imports
transformers when asked, for only it knows every published tokenizer.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from redco_flow.engine.files import reading
from redco_flow.errors import RedcoFlowError
from redco_flow.hub import config_in, download_model, is_hub_name, whole_download
from redco_flow.local_paths import expanded, is_folder
from redco_flow.models.hub.model_files import CONFIG_FILES, model_type_of, weight_files
from redco_flow.records import digest_file, digest_json
from redco_flow.spec.pipeline import DataSection, ModelSection
from redco_flow.text.tokenizer import TextTokenizer
from redco_flow.text.tokenizer_files import (
    TOKENIZER_PATTERNS,
    VOCABULARY_PATTERNS,
    files_in,
    has_tokenizer,
    load_pretrained,
)

if TYPE_CHECKING:  # pyarrow, which a plan does not need
    from redco_flow.stages.artifacts.dataset import DatasetArtifact


def tokenizer_source(model: ModelSection, data: DataSection) -> str | None:
    """Return the name or directory of the tokenizer to load; None where one is trained."""
    if data.tokenizer is None:
        return model.name_or_path
    return data.tokenizer.name_or_path


def tokenizer_files(model: ModelSection, data: DataSection) -> list[Path]:
    """Return all files that a tokenizer in a local directory is loaded from; none for the hub's."""
    source = tokenizer_source(model, data)
    return [] if source is None else files_of_tokenizer(source)


def files_of_tokenizer(name_or_path: str) -> list[Path]:
    """Return all files that the tokenizer in a local directory is loaded from."""
    return _files_in(name_or_path, TOKENIZER_PATTERNS)


def template_files(data: DataSection) -> list[Path]:
    """Return the file of a chat template apart from the tokenizer's."""
    name = data.chat_template
    return [expanded(name)] if name is not None and name.endswith(".jinja") else []


def model_files(model: ModelSection) -> list[Path]:
    """Return all files that a model in a local directory is read from; none for the hub's."""
    name = model.name_or_path
    if name is None:
        return []
    if model.from_scratch:
        return _files_in(name, CONFIG_FILES)
    weights = [path.absolute() for path in weight_files(expanded(name))]
    return sorted({*_files_in(name, (*CONFIG_FILES, *TOKENIZER_PATTERNS)), *weights})


def family_in_files(model: ModelSection) -> str | None:
    """Return what a local directory's config.json calls its family; None where nothing does."""
    if model.name_or_path is None:
        return None
    return model_type_of(config_in(expanded(model.name_or_path))) or None


def _files_in(name_or_path: str, patterns: Sequence[str]) -> list[Path]:
    return [path.absolute() for path in files_in(expanded(name_or_path), patterns)]


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
    folder = _find_tokenizer(name_or_path, revision)
    try:
        tokenizer = _load(folder)
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


def _load(folder: Path) -> Any:
    """Load a tokenizer from the files in TOKENIZER_PATTERNS alone: a fingerprint has all of them.

    Raises:
        OSError, ValueError: it cannot be loaded, or lacks a file of its vocabulary.
    """
    with tempfile.TemporaryDirectory(prefix="redco-flow-tokenizer-") as name:
        seen = Path(name)
        for path in files_in(folder, TOKENIZER_PATTERNS):
            link = seen / path.relative_to(folder)
            link.parent.mkdir(exist_ok=True)
            link.symlink_to(path.resolve())
        try:
            with reading(seen, "a tokenizer"):
                tokenizer = load_pretrained(seen)
                _check_vocabulary(tokenizer, seen)
        except (OSError, ValueError) as error:
            there = [path.name for path in files_in(folder, VOCABULARY_PATTERNS)]
            raise ValueError(
                f"{str(error).replace(name, str(folder))} (files with a vocabulary there: "
                f"{', '.join(there) or 'none'})"
            ) from error
    return tokenizer


def _check_vocabulary(tokenizer: Any, folder: Path) -> None:
    """Refuse a tokenizer without a part of its vocabulary, which transformers leaves empty."""
    if files_in(folder, ("tokenizer.json", "tokenizer.*.json")):
        return
    needed = {key: file for key, file in tokenizer.vocab_files_names.items()
              if key != "tokenizer_file"}  # fmt: skip
    lacking = [file for file in needed.values() if not _has_content(folder / file)]
    others = files_in(folder, ("tekken.json", "tokenizer.model*", "*.tiktoken"))
    if lacking and not any(map(_has_content, others)):
        raise ValueError(
            f"{folder}: a {type(tokenizer).__name__} is read from tokenizer.json, or from "
            f"{', '.join(needed.values())}; missing or empty: {', '.join(lacking)}."
        )


def _has_content(path: Path) -> bool:
    return path.is_file() and path.stat().st_size > 0


def _find_tokenizer(name_or_path: str, revision: str | None) -> Path:
    """The directory of a tokenizer's files, downloaded where the name is a hub id."""
    path = expanded(name_or_path)
    if is_folder(path) or not is_hub_name(name_or_path):
        return path

    def is_whole(folder: Path) -> bool:
        is_listed = (
            whole_download("model", name_or_path, folder.name, TOKENIZER_PATTERNS) is not None
        )
        return has_tokenizer(folder) or is_listed  # a model may have none

    return download_model(name_or_path, revision, TOKENIZER_PATTERNS, is_whole)


def digest_of_tokenizer_files(name_or_path: str, revision: str | None) -> str:
    """Return one digest of all files that a tokenizer is loaded from, and of their names."""
    return _digest_of_files(_find_tokenizer(name_or_path, revision))


def _digest_of_files(folder: Path) -> str:
    files = files_in(folder, TOKENIZER_PATTERNS)
    return digest_json({str(path.relative_to(folder)): digest_file(path) for path in files})


def check_model_tokenizer(model: ModelSection, dataset: DatasetArtifact) -> None:
    """Refuse data that was encoded with another tokenizer than the pretrained model's.

    A model without one of its own, or one that starts from scratch, takes the data's. The model's
    is loaded only where its files are not those that the data's was loaded from: transformers
    takes seconds to import, and imports torch where that is installed.

    Raises:
        WrongTokenizer: they differ; the message has both digests and what to do.
    """
    name = model.name_or_path
    if name is None or model.from_scratch:
        return
    found = _find_tokenizer(name, model.revision)
    if not has_tokenizer(found):
        return
    if dataset.summary.tokenizer.get("files") == _digest_of_files(found):
        return
    with tempfile.TemporaryDirectory(prefix="redco-flow-tokenizer-") as folder:
        save_pretrained_tokenizer(name, Path(folder), revision=model.revision)
        own = TextTokenizer.load(Path(folder))
    data_tokenizer = dataset.tokenizer
    if own.digest != data_tokenizer.digest:
        raise WrongTokenizer(
            f"the data was encoded with another tokenizer (digest {data_tokenizer.digest[:12]}, "
            f"{data_tokenizer.vocab_size} tokens) than that of the model '{name}' (digest "
            f"{own.digest[:12]}, {own.vocab_size} tokens). Preprocess with the model's: leave "
            "data.tokenizer out; or train from scratch with model.from_scratch: true."
        )
