"""Token ids of several examples, and how texts become them: cut to a length, with an ending.

Runs in preprocessing, long before a model is there, so it imports nothing heavy and a change in
a model's code does not make data stale. Refuses to know padding and shifting, which belong to a
batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from redco_flow.recipes.text_tokenizer import TextTokenizer


@dataclass(frozen=True)
class Windows:
    """Where each example stands in its text, when a text may be several examples.

    Args:
        text_of: index of each example's text, ascending.
        texts: what each example says.
    """

    text_of: list[int]
    texts: list[str]


@dataclass(frozen=True)
class EncodedPairs:
    """Ids of several examples.

    Args:
        is_source_cut, is_target_cut: whether text had to be cut off at the maximal length.
        windows: None where each text is one example.
    """

    source_ids: list[list[int]]
    target_ids: list[list[int]]
    is_source_cut: list[bool]
    is_target_cut: list[bool]
    windows: Windows | None = None


def encode_ending(
    texts: Sequence[str], tokenizer: TextTokenizer, max_length: int, ending: Sequence[int]
) -> tuple[list[list[int]], list[bool]]:
    """Encode texts that all end alike; return their ids, and which were cut off.

    Args:
        max_length: in tokens, the ending included, which is never cut off.

    Raises:
        ValueError: the ending leaves no room for a token of the text.
    """
    room = max_length - len(ending)
    if room < 1:
        raise ValueError(
            f"the maximal length is {max_length} tokens, and {len(ending)} of them are what "
            "every text ends with (data.source_suffix, the end token): allow more."
        )
    ids = tokenizer.encode_batch(texts)
    is_cut = [len(row) > room for row in ids]
    for row in ids:
        row[room:] = ending
    return ids, is_cut
