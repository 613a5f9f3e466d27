"""A tokenizer directory in Hugging Face's format, read with `tokenizers` alone.

Text to token ids and back, without special tokens: recipes add those. Knows `tokenizer.json`
and which tokens pad and end a text. Does not import transformers, which costs seconds.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from redco_flow.engine.files import UnreadableFile, reading
from redco_flow.records import digest_json, read_json

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


INT32 = "i"
"""The type of ids in arrays."""


class FlatIds:
    """Rows of int32 ids, of any lengths.

    Args:
        rows: to begin with.

    Attributes:
        ids: of all rows.
        offsets: where in `ids` each row begins, and where the last one ends.

    Raises:
        OverflowError, TypeError: an id is no int32.
    """

    def __init__(self, rows: Iterable[Sequence[int]] = ()) -> None:
        self.ids = array(INT32)
        self.offsets = array(INT32, [0])
        self.extend(rows)

    def append(self, row: Iterable[int]) -> None:
        """Add a row; an int32 array is copied as it is."""
        self.ids.extend(row)
        self.offsets.append(len(self.ids))

    def extend(self, rows: FlatIds | Iterable[Sequence[int]]) -> None:
        """Add rows."""
        if not isinstance(rows, FlatIds):
            for row in rows:
                self.append(row)
            return
        start = len(self.ids)
        self.ids.extend(rows.ids)
        self.offsets.extend(start + end for end in rows.offsets[1:])

    def take_first(self, num_rows: int) -> FlatIds:
        """Take out the first rows, or all where there are fewer, and return them."""
        taken = FlatIds()
        taken.offsets = self.offsets[: num_rows + 1]
        end = taken.offsets[-1]
        taken.ids, self.ids = self.ids[:end], self.ids[end:]
        self.offsets = array(INT32, (offset - end for offset in self.offsets[len(taken) :]))
        return taken

    def lengths(self) -> list[int]:
        """Return how many ids each row has."""
        return [end - start for start, end in pairwise(self.offsets)]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __iter__(self) -> Iterator[list[int]]:
        return (self.ids[start:end].tolist() for start, end in pairwise(self.offsets))


def as_flat(rows: FlatIds | Iterable[Sequence[int]]) -> FlatIds:
    """Return rows as FlatIds."""
    return rows if isinstance(rows, FlatIds) else FlatIds(rows)


@dataclass(frozen=True)
class TextTokenizer:
    """A tokenizer with its padding and end-of-text tokens.

    Args:
        backend: a `tokenizers.Tokenizer`.
        pad_id, eos_id: ids of the two special tokens that every recipe needs; a tokenizer without
            a padding token, as of most decoder-only models, pads with the end token; one without
            an end token, as BERT's, ends texts with its separator, `[SEP]`.
    """

    backend: Any
    pad_id: int
    eos_id: int

    @classmethod
    def load(cls, directory: Path) -> TextTokenizer:
        """Read a directory with tokenizer.json and tokenizer_config.json.

        Raises:
            UnreadableFile: it is no such directory, or it has no end token.
        """
        from tokenizers import Tokenizer

        config_path, path = directory / "tokenizer_config.json", directory / "tokenizer.json"
        try:
            with reading(config_path, "a tokenizer's configuration"):
                config = dict(read_json(config_path).items())
            with reading(path, "a tokenizer"):
                backend = Tokenizer.from_str(path.read_text("utf-8"))
                backend.no_padding()
                backend.no_truncation()
                _try_out(backend)
        except FileNotFoundError as error:
            raise UnreadableFile(
                f"{directory}: no tokenizer: {error.filename} is missing."
            ) from error
        backend.encode_special_tokens = bool(config.get("split_special_tokens", False))
        eos_id = _special_id(backend, config, "eos_token")
        if eos_id is None:
            eos_id = _special_id(backend, config, "sep_token")
        if eos_id is None:
            raise UnreadableFile(
                f"{directory}: the tokenizer has no eos_token and no sep_token; every recipe needs "
                "one of them."
            )
        pad_id = _special_id(backend, config, "pad_token")
        return cls(backend, eos_id if pad_id is None else pad_id, eos_id)

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        ids = self.backend.get_vocab(with_added_tokens=True).values()
        return 1 + int(max(ids))

    @cached_property
    def digest(self) -> str:
        """Digest of everything that turns text to ids, and of the two tokens."""
        content = json.loads(self.backend.to_str())
        kept = {key: content[key] for key in content if key not in ("padding", "truncation")}
        vocab = self.backend.get_vocab(with_added_tokens=True)
        return digest_json(
            {
                # The fast path for the large part: sorted JSON of 32,000 scores takes long.
                "model": hashlib.sha256(json.dumps(kept.pop("model")).encode()).hexdigest(),
                "rest": kept,
                "vocab_size": len(vocab),
                "pad_id": self.pad_id,
                "eos_id": self.eos_id,
                "split_special_tokens": self.backend.encode_special_tokens,
            }
        )

    @cached_property
    def prefix_ids(self) -> tuple[int, ...]:
        """The special tokens that its own template puts before a text: LLaMA's `<s>`."""
        encoding = self.backend.encode("a", add_special_tokens=True)
        # Not by the mask of special tokens: the text itself may be one that is unknown.
        places = [place for place, of in enumerate(encoding.sequence_ids) if of is not None]
        return tuple(encoding.ids[: places[0]]) if places else ()

    @cached_property
    def suffix_ids(self) -> tuple[int, ...]:
        """The special tokens that its own template puts behind a text: BERT's `[SEP]`."""
        encoding = self.backend.encode("a", add_special_tokens=True)
        num_last = encoding.special_tokens_mask[::-1].index(0)
        return tuple(encoding.ids[len(encoding.ids) - num_last :])

    def encode_suffix(self, text: str) -> list[int]:
        """Return the ids of what follows other texts, encoded on its own; none of no text."""
        return self.encode_batch([text])[0] if text else []

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return each text's ids, whole and without special tokens."""
        return [ids.tolist() for ids in self.encode_each(texts)]

    def encode_each(self, texts: Sequence[str]) -> Iterator[array[int]]:
        """Yield what `encode_batch` returns, each text's ids as an int32 array of its own."""
        encodings = self.backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return (array(INT32, encoding.ids) for encoding in encodings)

    def decode_batch(self, ids: Sequence[Sequence[int]]) -> list[str]:
        """Return texts without special tokens and outer white space."""
        return [text.strip() for text in self.decode_whole(ids)]

    def decode_whole(self, ids: Sequence[Sequence[int]]) -> list[str]:
        """Return texts without special tokens, with outer white space."""
        batch = [list(map(int, row)) for row in ids]
        texts: list[str] = self.backend.decode_batch(batch, skip_special_tokens=True)
        return texts

    def decode_until_end(
        self, tokens: NDArray[np.int32], end_ids: Collection[int] = ()
    ) -> list[str]:
        """Decode (B, T) ids up to each row's first end token; other ids than tokens' are left out.

        Args:
            end_ids: tokens that end a text besides the tokenizer's own.
        """
        rows = (self.until_end(row, end_ids) for row in tokens.tolist())
        return self.decode_batch([[id_ for id_ in row if id_ < self.vocab_size] for row in rows])

    def until_end(self, ids: Sequence[int], end_ids: Collection[int] = ()) -> Sequence[int]:
        """Return the ids before the first end token: the tokenizer's own, or one of `end_ids`."""
        ends = {self.eos_id, *end_ids}
        place = next((place for place, id_ in enumerate(ids) if id_ in ends), len(ids))
        return ids[:place]


def _try_out(backend: Any) -> None:
    """Use a tokenizer in every way that it will be: a damaged one may fail only then."""
    ids = backend.get_vocab(with_added_tokens=True).values()
    text = backend.decode([min(ids), max(ids)], skip_special_tokens=True)
    backend.encode_batch_fast([text], add_special_tokens=False)
    backend.encode("a", add_special_tokens=True)


def _special_id(backend: Any, config: dict[str, Any], key: str) -> int | None:
    token = config.get(key)
    if isinstance(token, dict):
        token = token.get("content")
    token_id = backend.token_to_id(token) if isinstance(token, str) else None
    return None if token_id is None else int(token_id)
