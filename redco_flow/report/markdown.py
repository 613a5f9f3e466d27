"""Text, code and tables of Markdown, for pages that show what users and models wrote as it is."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence

from redco_flow.terminal_text import visible

_MEANT_AS_MARKDOWN = re.compile(r"[\[\]`\\*~]|(?<![^\W_])_|_(?![^\W_])")


def text(value: object) -> str:
    """Return text in one line that Markdown shows as it is: no HTML, link, image or code."""
    line = html.escape(" ".join(visible(str(value)).split()), quote=False)
    return _MEANT_AS_MARKDOWN.sub(r"\\\g<0>", line)


def code(value: object) -> str:
    """Return a path or an id as code; what would end the code is written out."""
    return "`" + " ".join(visible(str(value)).replace("`", "\\x60").split()) + "`"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of cells that are Markdown already."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(_cell(cell) for cell in line)} |" for line in lines)


def _cell(value: str) -> str:
    return value.replace("|", "\\|")
