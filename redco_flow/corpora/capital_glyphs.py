"""Capital letters and digits as images of 16×16 pixels: few enough to learn to draw in a minute.

Rows as those of `glyphs`, each character in three sizes of each font.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from string import ascii_uppercase, digits
from typing import Any

from redco_flow.corpora.glyphs import draw_rows, files, identity

__all__ = ["files", "identity", "rows"]

SIZE = 16
EMS = (12, 13, 14)


def rows(paths: Iterable[Path]) -> Iterator[dict[str, Any]]:
    """Yield a row for each character of each size of each font."""
    for path in paths:
        for em in EMS:
            yield from draw_rows([path], ascii_uppercase + digits, SIZE, em)
