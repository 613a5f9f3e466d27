"""Cut a generated text before the first of some stop strings, also while it is generated."""

from __future__ import annotations

from collections.abc import Sequence


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
