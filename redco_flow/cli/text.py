"""Numbers, durations and columns as a person reads them. Plain text; no terminal codes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from redco_flow.report import numbers

if TYPE_CHECKING:
    from redco_flow.report.runs_page import Cell, RunsPage, Table


def duration(seconds: float | None) -> str:
    """12.3 → "12 s", 83 → "1 min 23 s", 7260 → "2 h 01 min"; None → ""."""
    return "" if seconds is None else numbers.duration(seconds).replace(numbers.THIN_SPACE, " ")


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

    def lines(self) -> list[str]:
        """Return the remarks with their marks, one a line."""
        return [f"[{index}] {text}" for index, text in enumerate(self._texts, 1)]


def size(num_bytes: int) -> str:
    """1536 → "1.5 KiB"."""
    return numbers.size(num_bytes).replace(numbers.THIN_SPACE, " ")


_MAX_CELL, _MAX_ROWS, _MAX_LINES = 100, 40, 60


def page_text(page: RunsPage, width: int, *, is_whole: bool = False) -> str:
    """Return the tables of a page as text, then its texts, footnotes and facts.

    Args:
        width: of the terminal, in characters; only tables that may be transposed keep to it.
        is_whole: every row of every table, and whole texts.
    """
    notes, blocks = Footnotes(), []
    for section in page.shown:
        blocks += [_table_text(table, notes, width, is_whole) for table in section.tables]
        if section.text:
            lines = section.text.splitlines()
            shown = lines if is_whole else lines[:_MAX_LINES]
            blocks.append("\n".join([*shown, *_left_out(len(lines) - len(shown), "lines")]))
    facts = [f"{name}: {text}" for name, text in page.facts]
    return "\n".join(["\n\n".join(blocks), *notes.lines(), "", *facts])


def _left_out(count: int, what: str) -> list[str]:
    return [f"… {count} more {what} (--all shows them)"] if count else []


def table_text(table: Table) -> str:
    """Return a table of plain texts, with whole cells: what is in them may be copied."""
    return columns([[cell.text for cell in row] for row in table.rows], _header(table))


def _header(table: Table) -> list[str]:
    return [name if name in table.names else name.upper() for name in table.header]


def _table_text(table: Table, notes: Footnotes, width: int, is_whole: bool) -> str:
    shown = table.rows if is_whole or table.may_transpose else table.rows[:_MAX_ROWS]
    rows = [[_cell_text(cell, notes) for cell in row] for row in shown]
    header = _header(table)
    if not table.may_transpose:
        left_out = _left_out(len(table.rows) - len(shown), "rows")
        return "\n".join([columns(rows, header), *left_out])
    transposed = [list(column) for column in zip(header, *rows, strict=True)]
    texts = [fitted_columns(one[1:], one[0], width) for one in ([header, *rows], transposed)]
    return min(texts, key=lambda text: text.count("\n\n"))


def _cell_text(cell: Cell, notes: Footnotes) -> str:
    text = cell.text if cell.value is None else number(cell.value)
    text = text.replace(numbers.THIN_SPACE, " ")
    if len(text) > _MAX_CELL:
        text = f"{text[: _MAX_CELL - 1]}…"
    mark = f"({cell.mark})" if cell.mark == "best" else cell.mark
    note = f"({cell.note})" if cell.note else ""
    footnote = notes.mark(cell.footnote) if cell.footnote else ""
    return " ".join(filter(None, (text, mark, note, footnote)))
