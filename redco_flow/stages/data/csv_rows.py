"""Read rows from delimited text: CSV with quotes, TSV without, or any dialect that is given."""

from __future__ import annotations

import csv
import logging
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from redco_flow.engine.files import UnreadableFile
from redco_flow.spec.raw_data import CsvDialect
from redco_flow.stages.data.rows import BadRow, FileRow, Rows, delimiter_hint
from redco_flow.stages.data.text_lines import MAX_LINE_BYTES, BadLine, TextLines

logger = logging.getLogger(__name__)

# What a writer with quotes makes of a text that has quotes: "he said ""yes"""
_QUOTED = re.compile(r'"(?:[^"]|"")*""(?:[^"]|"")*"')


_QUOTES_ARE_TEXT = "; if quotes are part of the texts: data.csv: {quoting: none}"


@dataclass(frozen=True)
class Dialect:
    """The dialect of a file, as far as a pipeline gives it; see `CsvDialect`.

    Args:
        column_names: empty: the first line has them.
    """

    delimiter: str | None = None
    quoting: Literal["minimal", "none"] | None = None
    column_names: tuple[str, ...] = ()
    skip_rows: int = 0

    @classmethod
    def of(cls, given: CsvDialect | None) -> Dialect:
        """Return what a pipeline's `data.csv` says."""
        if given is None:
            return cls()
        names = tuple(given.column_names or ())
        return cls(given.delimiter, given.quoting, names, given.skip_rows)

    def over(self, default: Dialect) -> Dialect:
        """Return the dialect with what another says where it says nothing."""
        return replace(
            self,
            delimiter=self.delimiter or default.delimiter,
            quoting=self.quoting or default.quoting,
            column_names=self.column_names or default.column_names,
            skip_rows=self.skip_rows or default.skip_rows,
        )


NO_DIALECT = Dialect()
CSV = Dialect(",", "minimal")
TSV = Dialect("\t", "none")  # as GLUE, Tatoeba and WMT write it: quotes are a part of texts


def read_csv(path: Path, given: Dialect, default: Dialect) -> Rows:
    """Yield the rows of a delimited text file.

    Raises:
        UnreadableFile: two columns have the same name.
    """
    csv.field_size_limit(MAX_LINE_BYTES)  # the default of 128 KiB refuses long documents
    dialect = given.over(default)
    header = dialect.column_names
    with _KeptLines(path) as lines:
        _skip(lines, dialect.skip_rows)
        rows = csv.reader(
            lines,
            delimiter=str(dialect.delimiter),
            quoting=csv.QUOTE_NONE if dialect.quoting == "none" else csv.QUOTE_MINIMAL,
            strict=True,
        )
        watch = _Watch(path, dialect, is_certain=given.quoting is not None)
        while True:
            line = lines.line + 1
            lines.kept.clear()
            try:
                values = next(rows)
            except StopIteration:
                return
            except (BadLine, csv.Error) as error:
                yield _bad_csv_row(path, line, lines, error)
                continue
            if not header:
                header = tuple(values)
                _check_header(path, line, header)
            elif problem := watch.problem_of(values, header, lines.kept):
                yield BadRow(f"{path}:{line}", *problem)
            elif values:
                yield FileRow(line, dict(zip(header, values, strict=True)))


class _KeptLines(TextLines):
    """Lines of a file, of which the last row's are kept."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.kept: list[str] = []

    def __next__(self) -> str:
        line = super().__next__()
        self.kept.append(line)
        return line


def _skip(lines: TextLines, num_lines: int) -> None:
    for _ in range(num_lines):
        try:
            lines.next_bytes()
        except BadLine:
            continue
        except StopIteration:
            return


def _check_header(path: Path, line: int, header: Sequence[str]) -> None:
    twice = [name for name, count in Counter(header).items() if name and count > 1]
    if twice:
        raise UnreadableFile(
            f"{path}:{line}: {header.count(twice[0])} columns are named '{twice[0]}': rename them, "
            f"or name all columns: data.csv: {{column_names: [...], skip_rows: {line}}}."
        )


class _Watch:
    """Looks for signs of another dialect than the one that a file is read by."""

    def __init__(self, path: Path, dialect: Dialect, *, is_certain: bool) -> None:
        self._path, self._delimiter, self._is_certain = path, str(dialect.delimiter), is_certain
        self._warns = not is_certain and dialect.quoting == "none"

    def problem_of(
        self, values: Sequence[str], header: Sequence[str], lines: Sequence[str]
    ) -> tuple[str, str] | None:
        """Say what is wrong with a row as (reason, detail), or None; warns once for a file."""
        if len(values) != len(header):
            return self._wrong_number(values, header)
        if len(lines) > 1 and self._spans_rows(lines, header):
            return "a quoted field spans rows", (
                f"it continues over {len(lines)} lines, each of which has the fields of a row. "
                "If quotes are part of the texts: data.csv: {quoting: none}; if the text does "
                "have these lines: data.csv: {quoting: minimal}"
            )
        if self._warns and any(_QUOTED.fullmatch(value) for value in values if value[:1] == '"'):
            self._warns = False
            logger.warning(
                "%s: fields seem to be in quotes, with quotes in them doubled, and are read "
                "as they are; data.csv: {quoting: minimal} removes the quotes, {quoting: none} "
                "this warning",
                self._path,
            )
        return None

    def _wrong_number(self, values: Sequence[str], header: Sequence[str]) -> tuple[str, str] | None:
        if not values:
            return None
        detail = f"{len(values)}; the header has {len(header)}: {', '.join(header)}"
        if len(header) == 1:
            detail += delimiter_hint(header[0])
        elif self._warns:
            detail += " (if fields with line breaks are in quotes: data.csv: {quoting: minimal})"
        return "wrong number of fields", detail

    def _spans_rows(self, lines: Sequence[str], header: Sequence[str]) -> bool:
        """Whether each line of one row would be a row if quotes were characters like any other."""
        if self._is_certain or len(header) == 1:
            return False
        return all(line.count(self._delimiter) == len(header) - 1 for line in lines)


def _bad_csv_row(path: Path, line: int, lines: TextLines, error: Exception) -> BadRow:
    if isinstance(error, BadLine):
        return BadRow(f"{path}:{lines.line}", error.reason, error.detail)
    detail = str(error)
    if "new-line" in detail:
        detail = "a carriage return without a line feed: put the field in quotes, or remove it"
        if line == 1:  # all of an old Mac's file is one line
            detail = "a carriage return without a line feed: convert the file: tr '\\r' '\\n'"
    elif "end of data" in detail:
        detail = (
            f"the quote that opens in this row is never closed (the file ends at {lines.line})"
            f"{_QUOTES_ARE_TEXT}"
        )
    elif "expected after" in detail:
        detail = f"a quoted field goes on after its closing quote{_QUOTES_ARE_TEXT}"
    return BadRow(f"{path}:{line}", "not CSV", detail)
