"""Numbers, durations and columns as a person reads them. Plain text; no terminal codes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from redco_flow.report import numbers


def duration(seconds: float | None) -> str:
    """12.3 → "12 s", 83 → "1 min 23 s", 7260 → "2 h 01 min"; None → ""."""
    return "" if seconds is None else numbers.duration(seconds).replace(numbers.THIN_SPACE, " ")


def moment(time: str) -> str:
    """Shorten a record's time: 2026-11-24T07:12:20.500+00:00 → 2026-11-24 07:12 UTC."""
    return f"{time[:16].replace('T', ' ')} UTC"


def number(value: Any) -> str:
    """A float with four significant digits; anything else as it is; None → ""."""
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def short_id(digest: str) -> str:
    """The first 12 hex digits: enough to name an artifact."""
    return digest[:12]


def columns(rows: Sequence[Sequence[str]], header: Sequence[str]) -> str:
    """Rows under a header in aligned columns, two spaces apart."""
    table = [list(header), *[list(row) for row in rows]]
    widths = [max(len(row[i]) for row in table) for i in range(len(header))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in table
    ]
    return "\n".join(line.rstrip() for line in lines)


def fitted_columns(rows: Sequence[Sequence[str]], header: Sequence[str], width: int) -> str:
    """Rows under a header in blocks of aligned columns, each at most `width` wide if possible.

    Each block begins with the first column. No cell is cut.
    """
    table = [list(header), *[list(row) for row in rows]]
    widths = [max(len(row[i]) for row in table) for i in range(len(header))]
    blocks: list[list[int]] = []
    left = 0
    for column in range(1, len(header)):
        if not blocks or left < widths[column] + 2:
            blocks.append([0])
            left = width - widths[0]
        blocks[-1].append(column)
        left -= widths[column] + 2
    return "\n\n".join(
        columns([[row[i] for i in block] for row in rows], [header[i] for i in block])
        for block in blocks
    )


class Footnotes:
    """Numbers the remarks on a table's cells: [1], [2], …; equal remarks share a number."""

    def __init__(self) -> None:
        self._texts: list[str] = []

    def mark(self, text: str) -> str:
        """Return the mark of a remark."""
        if text not in self._texts:
            self._texts.append(text)
        return f"[{self._texts.index(text) + 1}]"

    def lines(self, prefix: str = "") -> list[str]:
        """Return the remarks with their marks, one a line."""
        return [f"[{index}] {prefix}{text}" for index, text in enumerate(self._texts, 1)]


def size(num_bytes: int) -> str:
    """1536 → "1.5 KiB"."""
    return numbers.size(num_bytes).replace(numbers.THIN_SPACE, " ")
