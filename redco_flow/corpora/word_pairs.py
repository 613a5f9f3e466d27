"""Two words and the same two turned around: rows for a training that is to be tried, not to learn.

Reads nothing, so that it is there on every cluster; knows nothing of tokens and models.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path

_ONES = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven")
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety", "hundred")
_WORDS = (*_ONES, *_TENS)


def files() -> list[Path]:
    """The rows are in this module."""
    return [Path(__file__)]


def rows(paths: Iterable[Path]) -> Iterator[dict[str, str]]:
    """Yield {"source", "target"}, 400 rows, always the same."""
    del paths
    for first, second in itertools.product(_WORDS, repeat=2):
        yield {"source": f"{first} {second}", "target": f"{second} {first}"}
