"""Sums as texts, made where they are needed: "17+5" and "22"."""

from collections.abc import Iterable, Iterator
from pathlib import Path


def files() -> list[Path]:
    """What the rows are made of; their digests identify the data."""
    return [Path(__file__)]


def rows(paths: Iterable[Path]) -> Iterator[dict[str, str]]:
    """Yield the rows, in an order that is always the same."""
    for first in range(40):
        for second in range(40):
            yield {"sum": f"{first}+{second}", "result": str(first + second)}
