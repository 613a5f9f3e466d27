"""Read rows from data files by their endings: csv, tsv, jsonl, json, parquet, arrow.

One function per format: path in; rows as mappings with their line, or `BadRow`s, out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from redco_flow.stages.data.arrow_rows import read_arrow, read_parquet
from redco_flow.stages.data.csv_rows import read_csv
from redco_flow.stages.data.json_rows import read_json
from redco_flow.stages.data.rows import Rows


def read_file(path: Path) -> Rows:
    """Yield the rows of one data file, in order.

    Raises:
        ValueError: the ending is unknown, or the file is no such file at all.
        OSError: it cannot be read.
    """
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise ValueError(
            f"{path}: unknown ending '{path.suffix}'; known: {', '.join(sorted(READERS))}."
        )
    yield from reader(path)


READERS: Mapping[str, Callable[[Path], Rows]] = {
    ".csv": partial(read_csv, delimiter=","),
    ".tsv": partial(read_csv, delimiter="\t"),
    ".json": read_json,
    ".jsonl": read_json,
    ".ndjson": read_json,
    ".parquet": read_parquet,
    ".arrow": read_arrow,
}
