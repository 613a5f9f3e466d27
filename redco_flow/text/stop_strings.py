"""Cut a generated text before the first of some stop strings."""

from __future__ import annotations

from collections.abc import Sequence


def cut_before(text: str, stops: Sequence[str]) -> str:
    """Return a text up to the stop string that is complete in it first.

    Of several that end at one place, the longest counts.
    """
    places = [(text.find(stop), len(stop)) for stop in stops if stop]
    found = [(start + length, start) for start, length in places if start >= 0]
    return text[: min(found)[1]] if found else text
