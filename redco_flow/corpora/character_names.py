"""Names of Unicode characters, and the general category that each is of.

    LATIN CAPITAL LETTER A WITH ACUTE   →   Lu        SQUARE ROOT   →   Sm

Every Python has the text, and some words say nearly everything. Left out are characters whose
names only count: ideographs and syllables.
"""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Iterable, Iterator
from pathlib import Path

_COUNTED = ("HANGUL SYLLABLE", "CJK ", "TANGUT ", "NUSHU ", "KHITAN ")


def files() -> list[Path]:
    """The names are part of the interpreter; this module chooses among them."""
    return [Path(__file__)]


def identity() -> dict[str, str]:
    """Other versions of Unicode have other characters."""
    return {"unicode": unicodedata.unidata_version}


def rows(paths: Iterable[Path]) -> Iterator[dict[str, str]]:
    """Yield {"name", "category"} in the order of the code points."""
    del paths
    for character in map(chr, range(sys.maxunicode + 1)):
        name = unicodedata.name(character, "")
        if name and not name.startswith(_COUNTED):
            yield {"name": name.lower(), "category": unicodedata.category(character)}
