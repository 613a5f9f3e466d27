"""The Python language reference as `help()` shows it: English with examples, half a megabyte.

    The "assert" statement · Assignment statements · Boolean operations · …

Every Python has the text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from pydoc_data import topics


def files() -> list[Path]:
    """The text, and what reads it."""
    return [Path(topics.__file__), Path(__file__)]


def rows(paths: Iterable[Path]) -> Iterator[dict[str, str]]:
    """Yield {"topic", "text"}, each text once, by their topics' names."""
    seen: set[str] = set()
    for topic, text in sorted(topics.topics.items()):
        if text not in seen:
            seen.add(text)
            yield {"topic": topic, "text": text}
