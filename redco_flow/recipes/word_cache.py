"""Encode each word once: texts repeat their words, and a tokenizer's work on one is the same.

Texts become ids several times as fast as by the tokenizer itself, and they are the same ids: where
a text falls into words that way, `word_cuts` says. Several threads may encode at the same time.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any

from redco_flow.recipes.flat_ids import INT32
from redco_flow.recipes.word_cuts import WordCuts

# What a word and its ids cost as objects, beside their own length.
_BYTES_PER_WORD = 200


class WordCache:
    """A tokenizer that remembers the words of the texts that it encoded.

    Args:
        backend: a `tokenizers.Tokenizer`.
        cuts: where its texts may be cut.
        max_bytes: about what it may take for the words after the first, and as much again for
            first words, which have no space before them; then it begins anew.
    """

    def __init__(self, backend: Any, cuts: WordCuts, max_bytes: int = 64 * 2**20) -> None:
        self._backend, self._cuts = backend, cuts
        before = " " if cuts.keeps_space else ""
        self._firsts = _Words(backend, cuts.added_ids, "", max_bytes)
        self._others = _Words(backend, cuts.added_ids, before, max_bytes)

    def encode(self, texts: Sequence[str]) -> Iterator[array[int]]:
        """Yield each text's ids, int32 and without special tokens."""
        cut = [self._cuts.words(text) for text in texts]
        firsts = self._firsts.encoded({words[0] for words in cut})
        others = self._others.encoded(set(chain.from_iterable(islice(w, 1, None) for w in cut)))
        rows = [_joined(words, firsts, others) for words in cut]
        whole = iter(self._encode_whole(texts, rows))
        return (array(INT32, next(whole).ids if row is None else row) for row in rows)

    def _encode_whole(self, texts: Sequence[str], rows: Sequence[bytes | None]) -> Sequence[Any]:
        """Encode the texts that have no row."""
        whole = [text for text, row in zip(texts, rows, strict=True) if row is None]
        encodings: Sequence[Any] = self._backend.encode_batch_fast(whole, add_special_tokens=False)
        return encodings


def _joined(
    words: Sequence[str], firsts: Mapping[str, bytes], others: Mapping[str, bytes]
) -> bytes | None:
    """Return a text's ids, or None if it is to be encoded whole: a word of it has no ids."""
    first, *rest = words
    try:
        return firsts[first] + b"".join([others[word] for word in rest])
    except KeyError:
        return None


class _Words:
    """The ids of words, as bytes of int32.

    Args:
        added_ids: a word with one of these has no ids of its own.
        before: what is put before each word when it is encoded.
    """

    def __init__(
        self, backend: Any, added_ids: frozenset[int], before: str, max_bytes: int
    ) -> None:
        self._backend, self._added_ids, self._before = backend, added_ids, before
        self._max_bytes = max_bytes
        self._known: dict[str, bytes] = {}
        self._unfit: set[str] = set()
        self._num_bytes = 0

    def encoded(self, words: set[str]) -> Mapping[str, bytes]:
        """Return the ids of at least these words, but of none that has an added token."""
        if self._num_bytes > self._max_bytes:
            # Not cleared: another thread may be reading them.
            self._known, self._unfit, self._num_bytes = {}, set(), 0
        known = self._known
        missing = list(words.difference(known, self._unfit))
        texts = [self._before + word for word in missing]
        encodings = self._backend.encode_batch_fast(texts, add_special_tokens=False)
        for word, encoding in zip(missing, encodings, strict=True):
            ids = encoding.ids
            if self._added_ids.isdisjoint(ids):
                known[word] = array(INT32, ids).tobytes()
            else:
                self._unfit.add(word)
            self._num_bytes += _BYTES_PER_WORD + len(word) + len(ids) * array(INT32).itemsize
        return known
