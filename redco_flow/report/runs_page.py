"""A page about several runs: sections of tables and charts, which the callers fill."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from redco_flow.records import write_text
from redco_flow.report.charts import Figure


@dataclass(frozen=True)
class Cell:
    """One cell of a table.

    Args:
        text: what it says.
        is_number: set flush right.
        mark: "best" for the best value of its column, "failed", or a state; empty for neither.
        note: said small under the text.
    """

    text: str
    is_number: bool = False
    mark: str = ""
    note: str = ""


@dataclass(frozen=True)
class Table:
    """A table whose first column names its rows.

    Args:
        caption: what it shows.
        header: of every column.
        rows: as wide as the header.
    """

    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[Cell]]

    def transposed(self) -> Table:
        """Return it with rows and columns exchanged."""
        rows = [
            [Cell(name), *(row[index] for row in self.rows)]
            for index, name in enumerate(self.header[1:], 1)
        ]
        return Table(self.caption, [self.header[0], *(row[0].text for row in self.rows)], rows)

    def is_number(self, column: int) -> bool:
        """Whether a column is of numbers."""
        return any(row[column].is_number for row in self.rows)


@dataclass(frozen=True)
class Section:
    """One part of a page.

    Args:
        title: its heading; the page's navigation has it too.
        tables: shown before the figures.
        note: said at its end.
        text: shown as it is, such as a patch.
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
        of: what it is: "sweep", "comparison", "history".
        title: such as a sweep's id.
        facts: (name, value), shown first.
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
    # Imported here: verbs that only describe a page need no templates.
    from redco_flow.report.rendering import render

    has_charts = any(section.figures for section in page.sections)
    write_text(path, render("runs.html.jinja", page.title, page=page, has_charts=has_charts))
    return path
