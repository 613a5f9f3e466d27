"""Turn pairs of source and target text into token ids: what text-to-text data looks like.

Runs in preprocessing, long before a model is there, so it imports nothing heavy and a change in
a model's code does not make data stale. Knows truncation and the end token; refuses to know
padding and shifting, which belong to a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from redco_flow.recipes.text_tokenizer import TextTokenizer


@dataclass(frozen=True)
class EncodedPairs:
    """Ids of several examples; every list ends with the end token.

    Args:
        is_source_cut, is_target_cut: whether text had to be cut off at the maximal length.
    """

    source_ids: list[list[int]]
    target_ids: list[list[int]]
    is_source_cut: list[bool]
    is_target_cut: list[bool]


def encode(
    sources: Sequence[str],
    targets: Sequence[str],
    tokenizer: TextTokenizer,
    *,
    source_prefix: str,
    max_source_length: int,
    max_target_length: int,
) -> EncodedPairs:
    """Encode examples; lengths count the end token, which is never cut off."""
    prefixed = [source_prefix + source for source in sources]
    source_ids, is_source_cut = _encode(prefixed, tokenizer, max_source_length)
    target_ids, is_target_cut = _encode(targets, tokenizer, max_target_length)
    return EncodedPairs(source_ids, target_ids, is_source_cut, is_target_cut)


def _encode(
    texts: Sequence[str], tokenizer: TextTokenizer, max_length: int
) -> tuple[list[list[int]], list[bool]]:
    ids = tokenizer.encode_batch(texts)
    is_cut = [len(row) >= max_length for row in ids]
    for row in ids:
        del row[max_length - 1 :]
        row.append(tokenizer.eos_id)
    return ids, is_cut
