"""The ends of a text: start and end tokens once, and the strings that stop it.

A prompt such as `<s>[INST] … [/INST]` has the start token in its own text, which a tokenizer reads
as that token. A second one is what no published model was trained with.
"""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence


def cut_before(text: str, stops: Sequence[str]) -> str:
    """Return a text up to the stop string that is complete in it first.

    Of several that end at one place, the longest counts.
    """
    places = [(text.find(stop), len(stop)) for stop in stops if stop]
    found = [(start + length, start) for start, length in places if start >= 0]
    return text[: min(found)[1]] if found else text


def settled(text: str, stops: Sequence[str]) -> str:
    """Return what no later text takes back of a text without a stop string.

    Its end may be the beginning of a stop string, or of a character whose other bytes follow.
    """
    text = text.rstrip("\ufffd")
    begun = (
        length for stop in stops for length in range(1, len(stop)) if text.endswith(stop[:length])
    )
    return text[: len(text) - max(begun, default=0)]


def begins_with(ids: Sequence[int], start: Sequence[int]) -> bool:
    """Whether a text begins with the tokens that are put before every text; False of none."""
    return len(start) > 0 and list(ids[: len(start)]) == list(start)


def with_start(ids: Sequence[int], start: Sequence[int]) -> list[int]:
    """Return a text with the start tokens before it, once."""
    return list(ids) if begins_with(ids, start) else [*start, *ids]


def take_start(ids: MutableSequence[int], start: Sequence[int]) -> bool:
    """Remove a text's own start tokens, and say whether it had them."""
    has_own = begins_with(ids, start)
    if has_own:
        del ids[: len(start)]
    return has_own


def take_end(ids: MutableSequence[int], end_id: int) -> bool:
    """Remove a text's own end token, and say whether it had one."""
    has_own = len(ids) > 0 and ids[-1] == end_id
    if has_own:
        del ids[-1:]
    return has_own
