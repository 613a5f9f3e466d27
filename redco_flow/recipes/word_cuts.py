"""Where a text may be cut so that its words, encoded apart, have the ids of the whole text.

A cut lies before a single space between two words. It is safe where nothing that the tokenizer
does reaches across it: no normalizer joins or removes what is on both sides, no pre-token and no
added token holds a character with a space behind it, and the model sees one pre-token at a time.
This is read from `tokenizer.json`, by the kinds of its parts; a tokenizer with any other part is
not cut at all.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

Part = Mapping[str, Any]

_SPACE = "▁"
"""What stands for a space in SentencePiece's vocabularies."""

_NOT_WHITE = r"[^\s▁]"
_PRINTABLE_ASCII = r"[!-~]"


# They neither make nor remove white space.
_KEEP_SPACES = frozenset(["NFC", "NFD"])
# They may, but not at a space between two printable ASCII characters: each changes a character
# or a grapheme by itself.
_KEEP_ASCII_SPACES = _KEEP_SPACES | {
    "BertNormalizer",
    "Lowercase",
    "NFKC",
    "NFKD",
    "Nmt",
    "Precompiled",
    "StripAccents",
}
# Of these pre-tokenizers a pre-token never holds a character with a space behind it.
_CUT_AT_SPACES = frozenset(["BertPreTokenizer", "Whitespace", "WhitespaceSplit"])
# They look at one pre-token at a time.
_CUT_FURTHER = _CUT_AT_SPACES | {"ByteLevel", "Digits", "Metaspace", "Punctuation", "Split"}
# The expressions of Qwen 2 and of LLaMA 3; GPT-2's is ByteLevel's own.
_PATTERNS_CUTTING_AT_SPACES = frozenset(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
    rf"{numbers}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    for numbers in (r"\p{N}", r"\p{N}{1,3}")
)
_MODELS = frozenset(["BPE", "Unigram", "WordLevel", "WordPiece"])
_TO_SPACE_SIGN = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
_PREPEND_SPACE_SIGN = {"type": "Prepend", "prepend": _SPACE}


@dataclass(frozen=True)
class WordCuts:
    """How texts are cut for one tokenizer.

    Args:
        neighbour: a regex of what may stand on either side of a cut's space.
        keeps_space: whether a word but the first is encoded with the space before it; else the
            tokenizer puts one before each text.
        added_ids: of the added tokens that it finds in texts. A word that has one is no word:
            some of them take the white space around them.
    """

    neighbour: str
    keeps_space: bool
    added_ids: frozenset[int]

    def words(self, text: str) -> list[str]:
        """Return the text's words; they and a space between each are the text."""
        is_plain = (
            text.isprintable()  # of all white space only the space is
            and (text.isascii() or self.neighbour == _NOT_WHITE)
            and "  " not in text
            and _SPACE not in text
            and text[:1] != " " != text[-1:]
        )
        return text.split(" ") if is_plain else self._cut.split(text)

    @cached_property
    def _cut(self) -> re.Pattern[str]:
        return re.compile(f"(?<={self.neighbour}) (?={self.neighbour})")


def find_cuts(tokenizer: Part, *, splits_special_tokens: bool) -> WordCuts | None:
    """Say where a tokenizer's texts may be cut; None: nowhere.

    Args:
        tokenizer: what `tokenizer.json` holds.
        splits_special_tokens: whether special tokens in texts are text.
    """
    added = [
        token
        for token in tokenizer["added_tokens"]
        if not (token["special"] and splits_special_tokens)
    ]
    if any(_may_hold_a_cut(token) for token in added):
        return None
    normalizers = _members(tokenizer["normalizer"], "normalizers")
    pre_tokenizers = _members(tokenizer["pre_tokenizer"], "pretokenizers")
    model, added_ids = tokenizer["model"], frozenset(token["id"] for token in added)
    if _sees_one_pre_token(model) and _cuts_at_spaces(pre_tokenizers):
        neighbour = _neighbour(normalizers)
        return WordCuts(neighbour, True, added_ids) if neighbour else None
    if _never_joins_words(model) and not any(token["normalized"] for token in added):
        keeps_space = _keeps_space(normalizers, pre_tokenizers)
        return None if keeps_space is None else WordCuts(_NOT_WHITE, keeps_space, added_ids)
    return None


def _members(part: Part | None, key: str) -> list[Part]:
    """Return what a sequence consists of, also of sequences; or the part itself."""
    if part is None:
        return []
    if part["type"] != "Sequence":
        return [part]
    return [member for inner in part[key] for member in _members(inner, key)]


def _may_hold_a_cut(token: Part) -> bool:
    """Whether an added token, also as normalized, might lie across a cut."""
    content = token["content"]
    return bool(re.search(r"\S\s", content)) or (token["normalized"] and not content.isascii())


def _neighbour(normalizers: Sequence[Part]) -> str | None:
    if all(part["type"] in _KEEP_SPACES for part in normalizers):
        return _NOT_WHITE
    if all(_keeps_ascii_spaces(part) for part in normalizers):
        return _PRINTABLE_ASCII
    return None


def _keeps_ascii_spaces(part: Part) -> bool:
    match part:
        case {"type": "Strip", "strip_left": False}:
            return True
        case {"type": "Replace", "pattern": {"Regex": " {2,}"}}:
            return True
        case {"type": "Replace", "pattern": {"String": str(found)}}:
            return not re.search(r"\s", found)
    return part["type"] in _KEEP_ASCII_SPACES


def _cuts_at_spaces(pre_tokenizers: Sequence[Part]) -> bool:
    if not pre_tokenizers or any(part["type"] not in _CUT_FURTHER for part in pre_tokenizers):
        return False
    match pre_tokenizers[0]:
        case {"type": "ByteLevel", "use_regex": True}:
            return True
        case {"type": "Metaspace", "replacement": "▁", "split": True}:
            return True
        case {"type": "Split", "pattern": {"Regex": str(found)}, "behavior": "Isolated"}:
            return found in _PATTERNS_CUTTING_AT_SPACES
    return pre_tokenizers[0]["type"] in _CUT_AT_SPACES


def _sees_one_pre_token(model: Part) -> bool:
    return model["type"] in _MODELS and not model.get("dropout")


def _never_joins_words(model: Part) -> bool:
    """Whether a model that sees the whole text makes no token of a word's end and the next's sign.

    Byte pairs are merged only into tokens of the vocabulary, so none reaches across then.
    """
    if model["type"] != "BPE" or model.get("dropout") or model.get("ignore_merges"):
        return False
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return False
    vocab = model["vocab"]
    return _SPACE in vocab and not any(_SPACE in token.lstrip(_SPACE) for token in vocab)


def _keeps_space(normalizers: Sequence[Part], pre_tokenizers: Sequence[Part]) -> bool | None:
    """Whether a word after the first is given with its space, by how spaces become signs."""
    match [*normalizers], [*pre_tokenizers]:
        case [prepend, replace], []:
            return False if (prepend, replace) == (_PREPEND_SPACE_SIGN, _TO_SPACE_SIGN) else None
        case [replace], [] | [{"type": "Split", "pattern": {"String": " "}}]:
            return True if replace == _TO_SPACE_SIGN else None
        case [], [{"type": "Metaspace", "replacement": "▁", "split": False}]:
            return True
    return None
