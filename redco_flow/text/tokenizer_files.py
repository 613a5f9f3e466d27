"""Which files a tokenizer is loaded from: one list for downloads, fingerprints and loading.

A tokenizer is loaded from a directory that holds the files of this list and no others.
"""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path

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
