"""Token ids of several examples, and how texts become them: cut to a length, with an ending.

Runs in preprocessing, long before a model is there, so it imports nothing heavy and a change in a
model's code does not make data stale.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from redco_flow.text.tokenizer import FlatIds, TextTokenizer

PAIR_SEPARATOR = "\0"
"""Between the two texts of a source (`data.pair_key`): no text has it, for rows with it are bad."""

IdRows = FlatIds | Sequence[Sequence[int]]


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
        source_ids, target_ids: a row per example; as `FlatIds` they are written without a copy.
        is_source_cut, is_target_cut: whether text had to be cut off at the maximal length.
        windows: None where each text is one example.
    """

    source_ids: IdRows
    target_ids: IdRows
    is_source_cut: list[bool]
    is_target_cut: list[bool]
    windows: Windows | None = None


def encode_ending(
    texts: Sequence[str], tokenizer: TextTokenizer, max_length: int, ending: Sequence[int]
) -> tuple[FlatIds, list[bool]]:
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
    rows, is_cut = FlatIds(), []
    for ids in tokenizer.encode_each(texts):
        is_cut.append(len(ids) > room)
        del ids[room:]
        ids.extend(ending)
        rows.append(ids)
    return rows, is_cut
