"""Token ids of several examples, and how texts become them: cut to a length, with an ending.

Or as the tokenizer's own template has them, one text or a pair of texts.

Runs in preprocessing, long before a model is there, so it imports nothing heavy and a change in a
model's code does not make data stale.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from redco_flow.text.special_tokens import begins_with, take_end, take_start
from redco_flow.text.tokenizer import INT32, FlatIds, TextTokenizer

TruncationSide = Literal["right", "left"]
"""Which end of a text that is too long is cut off; transformers' name and values."""

PAIR_SEPARATOR = "\0"
"""Between the two texts of a source (`data.pair_key`): no text has it, for rows with it are bad."""

IdRows = FlatIds | Sequence[Sequence[int]]


@dataclass(frozen=True)
class Windows:
    """Positions of examples within texts, when a text is cut into several.

    Args:
        text_of: index of each example's text, ascending.
        texts: what each example says.
        sources: what each is given; None: its text's own source.
    """

    text_of: list[int]
    texts: list[str]
    sources: list[str] | None = None


@dataclass(frozen=True)
class EncodedPairs:
    """Ids of several examples.

    Args:
        source_ids, target_ids: a row per example; as `FlatIds` they are written without a copy.
        is_source_cut, is_target_cut: whether text had to be cut off at the maximal length.
        windows: None where each text is one example.
        more: further columns of ids, by name.
        counts: what else is counted of them, for the dataset's summary.
        unusable: texts that cannot be used: each one's index (preprocessing puts its row's id
            there), reason and detail.
    """

    source_ids: IdRows
    target_ids: IdRows
    is_source_cut: list[bool]
    is_target_cut: list[bool]
    windows: Windows | None = None
    more: Mapping[str, IdRows] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)
    unusable: Sequence[tuple[int | str, str, str]] = ()


class EndedTexts(NamedTuple):
    """Ids of texts that all end alike.

    Args:
        is_cut: which were cut to the maximal length.
        num_own_starts, num_own_ends: how many had the start or end tokens in their own text.
    """

    ids: FlatIds
    is_cut: list[bool]
    num_own_starts: int
    num_own_ends: int


def encode_ending(
    texts: Sequence[str],
    tokenizer: TextTokenizer,
    max_length: int,
    ending: Sequence[int],
    *,
    start: Sequence[int] = (),
    with_start: bool = False,
    truncation_side: TruncationSide = "right",
) -> EndedTexts:
    """Encode texts that all end alike.

    Args:
        max_length: in tokens, the ending included, which is never cut off.
        ending: where it is the end token alone, a text that ends with it gets no second one.
        start: what comes before every text later on: it is left out of a text that begins with it.
        with_start: the start is part of each row and of its length.
        truncation_side: which end of a text is cut off.

    Raises:
        ValueError: the ending leaves no room for a token of the text.
    """
    first = array(INT32, start if with_start else ())
    room = max_length - len(first) - len(ending)
    if room < 1:
        raise ValueError(
            f"the maximal length is {max_length} tokens, and {max_length - room} of them are what "
            "every text begins and ends with (data.source_suffix, start, end): allow more."
        )
    rows, is_cut, num_own_starts, num_own_ends = FlatIds(), [], 0, 0
    is_end_alone = list(ending) == [tokenizer.eos_id]
    for ids in tokenizer.encode_each(texts):
        num_own_starts += take_start(ids, start)
        num_own_ends += is_end_alone and take_end(ids, tokenizer.eos_id)
        num_over = len(ids) - room
        is_cut.append(num_over > 0)
        if num_over > 0:
            del ids[slice(room, None) if truncation_side == "right" else slice(num_over)]
        ids.extend(ending)
        rows.append(first + ids)
    return EndedTexts(rows, is_cut, num_own_starts, num_own_ends)


def own_token_counts(*encoded: EndedTexts) -> dict[str, int]:
    """Return `own_starts` and `own_ends` of texts, for a dataset's summary; nothing where none."""
    counts = {
        "own_starts": sum(one.num_own_starts for one in encoded),
        "own_ends": sum(one.num_own_ends for one in encoded),
    }
    return {name: count for name, count in counts.items() if count}


def encode_in_template(
    sources: Sequence[str],
    tokenizer: TextTokenizer,
    max_length: int,
    suffix: str = "",
    *,
    truncation_side: TruncationSide = "right",
) -> EncodedPairs:
    """Encode texts, or pairs joined by PAIR_SEPARATOR, in the tokenizer's own template.

    Args:
        max_length: in tokens, those of the template included, which are never cut off; of a pair
            the longer text is cut first, to the length of the other, then both.
        suffix: of the last text, encoded on its own; never cut off.
        truncation_side: which end of each text is cut off.

    Returns:
        As source ids the tokens of type 0, and as target ids those of type 1 behind them: of
        BERT's `[CLS] a [SEP] b [SEP]` the second text with its end.

    Raises:
        ValueError: the template leaves no room for a token of each text.
    """
    backend = tokenizer.backend
    texts = [source.split(PAIR_SEPARATOR) for source in sources]
    encodings = iter(
        backend.encode_batch([one for row in texts for one in row], add_special_tokens=False)
    )
    ending = backend.encode(suffix, add_special_tokens=False) if suffix else None
    first, second, is_cut = FlatIds(), FlatIds(), []
    own: Counter[str] = Counter()
    for row in texts:
        parts = [next(encodings) for _ in row]
        own["own_starts"] += _cut_own_start(parts[0], tokenizer.prefix_ids)
        own["own_ends"] += not ending and _cut_own_end(parts[-1], tokenizer.suffix_ids)
        num_special = backend.num_special_tokens_to_add(len(parts) > 1)
        room = max_length - num_special - (len(ending) if ending else 0)
        kept = _kept_lengths([len(part) for part in parts], room)
        is_cut.append(any(len(part) > length for part, length in zip(parts, kept, strict=True)))
        for part, length in zip(parts, kept, strict=True):
            part.truncate(length, direction=truncation_side)
        if ending:
            parts[-1] = type(ending).merge([parts[-1], ending], growing_offsets=False)
        _append(backend.post_process(*parts), first, second)
    counts = {name: count for name, count in own.items() if count}
    return EncodedPairs(first, second, is_cut, [False] * len(is_cut), counts=counts)


def _cut_own_start(part: Any, start: Sequence[int]) -> bool:
    """Remove the tokens that the template puts first from a text that has them itself."""
    has_own = begins_with(part.ids, start)
    if has_own:
        part.truncate(len(part) - len(start), direction="left")
    return has_own


def _cut_own_end(part: Any, end: Sequence[int]) -> bool:
    """Remove the tokens that the template puts last from a text that has them itself."""
    has_own = len(end) > 0 and list(part.ids[-len(end) :]) == list(end)
    if has_own:
        part.truncate(len(part) - len(end))
    return has_own


def _kept_lengths(lengths: Sequence[int], room: int) -> list[int]:
    """Return how many tokens of one text or two stay, as `tokenizers` cuts the longest first."""
    if room < len(lengths):
        raise ValueError(
            f"the maximal length leaves {room} tokens beside those of the tokenizer's template and "
            "data.source_suffix: allow more (max_source_length)."
        )
    if sum(lengths) <= room:
        return list(lengths)
    if len(lengths) == 1:
        return [room]
    shorter = min(lengths)
    both = (shorter, max(shorter, room - shorter))
    if sum(both) > room:
        both = (room // 2, room - room // 2)
    return list(both if lengths[0] <= lengths[1] else reversed(both))


def _append(encoding: Any, first: FlatIds, second: FlatIds) -> None:
    """Split a text's ids where their types go from 0 to 1."""
    ids, types = encoding.ids, encoding.type_ids
    start = types.index(1) if types == sorted(types) and 1 in types else len(ids)
    first.append(ids[:start])
    second.append(ids[start:])
