"""Read rows from delimited text: CSV and TSV."""

from __future__ import annotations

import csv
from pathlib import Path

from redco_flow.stages.data.rows import BadRow, FileRow, Rows
from redco_flow.stages.data.text_lines import MAX_LINE_BYTES, BadLine, TextLines


def read_csv(path: Path, delimiter: str) -> Rows:
    """Yield the rows below a file's header line."""
    csv.field_size_limit(MAX_LINE_BYTES)  # the default of 128 KiB refuses long documents
    with TextLines(path) as lines:
        rows = csv.reader(lines, delimiter=delimiter, strict=True)
        header: list[str] | None = None
        while True:
            line = lines.line + 1
            try:
                values = next(rows)
            except StopIteration:
                return
            except (BadLine, csv.Error) as error:
                yield _bad_csv_row(path, line, lines, error)
                continue
            if header is None:
                header = values
            elif len(values) == len(header):
                yield FileRow(line, dict(zip(header, values, strict=True)))
            elif values:
                detail = f"{len(values)}; the header has {len(header)}: {', '.join(header)}"
                yield BadRow(f"{path}:{line}", "wrong number of fields", detail)


def _bad_csv_row(path: Path, line: int, lines: TextLines, error: Exception) -> BadRow:
    if isinstance(error, BadLine):
        return BadRow(f"{path}:{lines.line}", error.reason, error.detail)
    detail = str(error)
    if "end of data" in detail:
        detail = f"the quote that opens in this row is never closed (the file ends at {lines.line})"
    return BadRow(f"{path}:{line}", "not CSV", detail)
