"""Bytecode, the Python statement that it was compiled from, and another one that is nearly right.

    load b load_method c load d call 1 store a   →   a = b.c(d), and not   a = b(c.d)

The wrong one is a statement of the same corpus, as long, with the same marks in another order, so
that neither its length nor its grammar tells it. Every machine with Python has the text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from redco_flow.corpora.decompilation import files, identity
from redco_flow.corpora.decompilation import rows as statements

__all__ = ["files", "identity", "rows"]


def rows(paths: Iterable[Path]) -> Iterator[dict[str, str]]:
    """Yield {"prompt", "chosen", "rejected"}, each prompt once.

    The rejected one is the latest before it of the same marks; the first of those has none.
    """
    latest: dict[str, str] = {}
    for row in statements(paths):
        statement = row["statement"]
        marks = _marks(statement)
        if marks in latest:
            yield {"prompt": row["bytecode"], "chosen": statement, "rejected": latest[marks]}
        latest[marks] = statement


def _marks(statement: str) -> str:
    """Return a statement's characters, letters being all alike, in the order of the alphabet."""
    return "".join(sorted("x" if char.isalpha() else char for char in statement))
