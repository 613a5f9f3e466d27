"""A page about several runs: sections of tables and charts, for HTML and for the terminal."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from redco_flow.records import write_text
from redco_flow.report.charts import Figure
from redco_flow.report.numbers import score

_MAX_WIDTH, _GAP = 110, 2  # in characters


@dataclass(frozen=True)
class Cell:
    """One cell of a table.

    Args:
        text: its content.
        is_number: aligned to the right.
        mark: "best" for the best value of its column, "failed", or a state; empty for neither.
        note: in small type below the text; in the terminal in parentheses after it.
        footnote: in small type too; in the terminal as a footnote, as it may be long.
        value: of a score, which the terminal shows with other digits than the page.
    """

    text: str
    is_number: bool = False
    mark: str = ""
    note: str = ""
    footnote: str = ""
    value: float | None = None

    def __bool__(self) -> bool:
        return bool(self.text or self.mark or self.note or self.footnote)

    @classmethod
    def of_score(
        cls, value: float | None, *, is_best: bool = False, note: str = "", footnote: str = ""
    ) -> Cell:
        """Return the cell of a metric's value."""
        mark = "best" if is_best else ""
        return cls(score(value), True, mark, note=note, footnote=footnote, value=value)


@dataclass(frozen=True)
class Table:
    """A table whose first column names its rows.

    Args:
        caption: its content, in words.
        header: of every column.
        rows: as wide as the header.
        names: headers that the terminal shows unchanged: names of the user's, such as metrics.
        may_transpose: whether rows and columns may be exchanged to fit page or terminal.
        links: of a page that is served, from a cell's text to the page that it is about.
    """

    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    names: Collection[str] = ()
    may_transpose: bool = False
    links: Mapping[str, str] = field(default_factory=dict)

    @property
    def readable(self) -> Table:
        """The table, transposed where it may be and is wider than the page and than high."""
        lines = [self.header, *([cell.text for cell in row] for row in self.rows)]
        width = sum(max(map(len, column)) + _GAP for column in zip(*lines, strict=True))
        is_wide = width > _MAX_WIDTH and len(self.header) > len(lines)
        return self.transposed() if self.may_transpose and is_wide else self

    def transposed(self) -> Table:
        """Return it with rows and columns exchanged."""
        rows = [
            [Cell(name), *(row[index] for row in self.rows)]
            for index, name in enumerate(self.header[1:], 1)
        ]
        labels = [row[0].text for row in self.rows]
        return Table(self.caption, [self.header[0], *labels], rows, labels, links=self.links)

    def compact(self) -> Table:
        """Return it without columns in which every cell is empty."""
        columns = range(len(self.header))
        kept = [one for one in columns if not self.rows or any(row[one] for row in self.rows)]
        rows = [[row[index] for index in kept] for row in self.rows]
        return replace(self, header=[self.header[index] for index in kept], rows=rows)

    def is_number(self, column: int) -> bool:
        """Whether a column is of numbers."""
        return any(row[column].is_number for row in self.rows)


@dataclass(frozen=True)
class Section:
    """One part of a page.

    Args:
        title: its heading, also in the page's navigation.
        tables: shown before the figures.
        note: shown at its end.
        text: shown unchanged, such as a patch.
    """

    title: str
    tables: Sequence[Table] = ()
    figures: Sequence[Figure] = ()
    note: str = ""
    text: str = ""

    @property
    def anchor(self) -> str:
        """Its place in the page."""
        return self.title.lower().replace(" ", "-")

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to show."""
        return not self.tables and not self.figures and not self.text


@dataclass(frozen=True)
class RunsPage:
    """A page about several runs.

    Args:
        of: its kind: "sweep", "comparison", "history", "plan".
        title: such as a sweep's id.
        facts: (name, value), shown first; in the terminal last.
        built_at: when, as an ISO time.
        state: of a sweep; empty where there is none.
    """

    of: str
    title: str
    facts: Sequence[tuple[str, str]]
    sections: Sequence[Section]
    built_at: str
    state: str = ""

    @property
    def shown(self) -> Iterator[Section]:
        """The sections that have something to show."""
        return (section for section in self.sections if not section.is_empty)


def write_page(page: RunsPage, path: Path) -> Path:
    """Write a page and return its path.

    Raises:
        OSError: the page cannot be written: the disk is full or read-only; names the path.
    """
    write_text(path, render_runs_page(page))
    return path


def render_runs_page(page: RunsPage, served: Mapping[str, Any] | None = None) -> str:
    """Return a page as HTML.

    Args:
        served: as of `rendering.render`.
    """
    # Imported here: verbs that only describe a page need no templates.
    from redco_flow.report.rendering import render

    has_charts = any(section.figures for section in page.sections)
    return render("runs.html.jinja", page.title, served, page=page, has_charts=has_charts)
