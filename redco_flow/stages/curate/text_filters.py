"""Text filters: by a text's words, near duplicates, and overlap with evaluation texts.

Source: Smith et al. 2022, MT-NLG, section 3.1 (near-duplicates by MinHash, then the removal of
13-grams of the tasks); differs: a text that meets an evaluation's is dropped whole. Rae et al.
2021, Gopher, appendix A.1.1 (rules of quality).
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from redco_flow.stages.curate.config import Config

_WORD = re.compile(r"\w+")
_SYMBOL = re.compile(r"#|\.\.\.|…")
_REPEATED_WORDS = 3
_NUM_PERMUTATIONS = 128
# Candidates are compared exactly: one too many costs a comparison, one too few is not found.
_WEIGHTS_OF_FALSE = (0.1, 0.9)


def words_of(text: str) -> list[str]:
    """Return the words as they are compared: without case, punctuation and forms of characters."""
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())


def grams(words: Sequence[str], size: int) -> Iterator[str]:
    """Yield each `size` neighbouring words; all of them where there are fewer."""
    for start in range(max(1, len(words) - size + 1)):
        yield " ".join(words[start : start + size])


def quality_problem(config: Config, text: str, words: Sequence[str]) -> str | None:
    """Say which of the rules a text breaks, or None."""
    return next(_broken_rules(config, text, words), None)


def _broken_rules(config: Config, text: str, words: Sequence[str]) -> Iterator[str]:
    total = max(1, len(words))
    if config.min_words is not None and len(words) < config.min_words:
        yield f"under {config.min_words} words"
    if config.max_words is not None and len(words) > config.max_words:
        yield f"over {config.max_words} words"
    if config.min_letter_share is not None:
        with_letter = sum(any(map(str.isalpha, word)) for word in words)
        if with_letter / total < config.min_letter_share:
            yield "too few words with letters"
    limit = config.max_symbol_share
    if limit is not None and len(_SYMBOL.findall(text)) / total > limit:
        yield "too many symbols"
    if config.max_repeated_share is not None and len(words) > _REPEATED_WORDS:
        ((_, count),) = Counter(grams(words, _REPEATED_WORDS)).most_common(1)
        if count > 1 and count * _REPEATED_WORDS / total > config.max_repeated_share:
            yield "repeats itself"


@dataclass(frozen=True)
class Twin:
    """Another row, and what of its text this one has.

    Args:
        similarity: Jaccard's, where whole texts were compared.
    """

    row_id: str
    text: str
    similarity: float | None = None


class EvaluationTexts:
    """The texts of evaluation splits, by the n-grams that they have.

    Memory: about 100 bytes for each n-gram.

    Args:
        size: words of an n-gram.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._rows: dict[int, str] = {}
        self._short: dict[int, str] = {}
        self._short_sizes: set[int] = set()

    def add(self, row_id: str, texts: Iterable[str]) -> None:
        """Take in a row's texts."""
        by_text = list(map(words_of, texts))
        if short := self._short_row(by_text):
            self._short.setdefault(_hash64(short), row_id)
            self._short_sizes.add(len(by_text))
        for gram in (gram for words in by_text for gram in self._grams(words)):
            self._rows.setdefault(_hash64(gram), row_id)

    def twin_of(self, texts: Sequence[Sequence[str]]) -> Twin | None:
        """Return a row that has an n-gram of these, or whose texts are shorter and end these.

        Of a row with one text that text has to be all: a short answer alone is in many rows.

        Args:
            texts: the words of each.
        """
        for size in self._short_sizes:
            short = self._short_row(texts[-size:]) if len(texts) == size or size > 1 else ""
            if short and (row_id := self._short.get(_hash64(short))):
                return Twin(row_id, short)
        for gram in (gram for words in texts for gram in self._grams(words)):
            if row_id := self._rows.get(_hash64(gram)):
                return Twin(row_id, gram)
        return None

    def _short_row(self, texts: Sequence[Sequence[str]]) -> str:
        """Return all of these texts where none has an n-gram, and empty text where one has."""
        is_short = any(texts) and all(len(words) < self._size for words in texts)
        return "\n".join(map(" ".join, texts)) if is_short else ""

    def _grams(self, words: Sequence[str]) -> Iterator[str]:
        return grams(words, self._size) if len(words) >= self._size else iter(())


class KeptTexts:
    """The texts kept so far, and which of them a new one repeats.

    MinHash finds candidates, and their shingles decide. Memory: about 4 kB a text, its characters
    and 4 bytes for each shingle.

    Args:
        threshold: Jaccard similarity from which on two texts are duplicates.
        shingle_words: neighbouring words of a shingle.
    """

    def __init__(self, threshold: float, shingle_words: int) -> None:
        from datasketch import MinHash, MinHashLSH

        self._threshold, self._shingle_words = threshold, shingle_words
        self._index = MinHashLSH(
            # At 1 it would look for equal signatures: those of equal shingles are.
            threshold=min(threshold, 0.99),
            num_perm=_NUM_PERMUTATIONS,
            weights=_WEIGHTS_OF_FALSE,
        )
        self._empty = MinHash(_NUM_PERMUTATIONS, hashfunc=int)
        self._kept: list[tuple[str, str, Any]] = []

    def twin_of(self, row_id: str, text: str, words: Sequence[str]) -> Twin | None:
        """Return the kept text that is most like this one, if it is enough so; else keep this."""
        found = {zlib.crc32(gram.encode()) for gram in grams(words, self._shingle_words)}
        shingles = np.array(sorted(found), np.uint32)
        signature = self._empty.copy()
        signature.update_batch(shingles.tolist())
        best: Twin | None = None
        likeness = 0.0
        for number in sorted(self._index.query(signature)):
            kept_id, kept_text, kept = self._kept[number]
            both = len(np.intersect1d(shingles, kept, assume_unique=True))
            similarity = both / (len(shingles) + len(kept) - both)
            if similarity >= max(self._threshold, likeness):
                best, likeness = Twin(kept_id, kept_text, similarity), similarity
        if best is None:
            self._index.insert(len(self._kept), signature, check_duplication=False)
            self._kept.append((row_id, text, shingles))
        return best


def _hash64(text: str) -> int:
    """Equal in every process, unlike Python's own."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())
