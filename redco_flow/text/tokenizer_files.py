"""List the files of a tokenizer: for downloads, fingerprints and loading alike; load one.

A tokenizer is loaded from a directory that holds the files of this list and no others.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

# What AutoTokenizer makes of tokenizer.json where no model asks for a class of its own.
_PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")

# The files of which transformers' tokenizers have at least one.
VOCABULARY_PATTERNS = (
    "tokenizer.json",
    "tokenizer.*.json",  # of a version of transformers
    "*vocab*.json",
    "*vocab*.txt",
    "merges.txt",
    "*.model",
    "tokenizer.model*",
    "*.tiktoken",
    "*.spm",
    "tekken.json",
    "dict.txt",
    "bpe.codes",
    "*.tokenizer",
)
TOKENIZER_PATTERNS = (
    "config.json",  # which says what class of tokenizer it is where tokenizer_config.json does not
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "emoji.json",
    "byte_maps.json",
    "normalizer.json",
    "word_shape.json",
    "word_pronunciation.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
    *VOCABULARY_PATTERNS,
)


def files_in(folder: Path, patterns: Iterable[str]) -> list[Path]:
    """Return a directory's files that fit one of the patterns, sorted."""
    found = {path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}
    return sorted(found)


def is_of_tokenizer(file: str) -> bool:
    """Tell whether a file, by its name, holds a tokenizer's vocabulary."""
    return any(fnmatchcase(file, pattern) for pattern in VOCABULARY_PATTERNS)


def has_tokenizer(folder: Path) -> bool:
    """Tell whether a directory has the files of a tokenizer."""
    return bool(files_in(folder, VOCABULARY_PATTERNS))


def load_pretrained(folder: Path) -> Any:
    """Load a tokenizer as transformers' AutoTokenizer does; no code of the folder is run.

    AutoTokenizer imports torch where that is installed, which takes seconds. It is not needed for a
    folder that names the plain class and has no model's config.json.

    Raises:
        OSError, ValueError: it cannot be loaded.
    """
    if _is_plain(folder):
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(
        str(folder), use_fast=True, local_files_only=True, trust_remote_code=False
    )


def _is_plain(folder: Path) -> bool:
    record = folder / "tokenizer_config.json"
    if (folder / "config.json").exists() or not record.is_file():
        return False
    read = json.loads(record.read_text(encoding="utf-8"))
    return (
        isinstance(read, dict)
        and read.get("tokenizer_class") in _PLAIN_CLASSES
        and "auto_map" not in read
        and (folder / "tokenizer.json").is_file()
    )
