"""Read rows from data files by their endings: csv, tsv, jsonl, json, parquet, arrow.

One function per format: path in; rows as mappings with their line, or `BadRow`s, out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from redco_flow.stages.data.arrow_rows import read_arrow, read_parquet
from redco_flow.stages.data.compression import CODECS, uncompressed_name
from redco_flow.stages.data.csv_rows import CSV, NO_DIALECT, TSV, Dialect, read_csv
from redco_flow.stages.data.json_rows import read_json
from redco_flow.stages.data.rows import Rows

_READERS: Mapping[str, Callable[[Path], Rows]] = {
    ".json": read_json,
    ".jsonl": read_json,
    ".ndjson": read_json,
    ".parquet": read_parquet,
    ".arrow": read_arrow,
}
DIALECTS: Mapping[str, Dialect] = {".csv": CSV, ".tsv": TSV}
TEXT_ENDINGS = (*DIALECTS, ".json", ".jsonl", ".ndjson")
KNOWN_ENDINGS = (
    f"{', '.join(sorted((*DIALECTS, *_READERS)))}; {', '.join(TEXT_ENDINGS)} also with "
    f"{' or '.join(CODECS)} behind"
)


def ending_of(path: Path) -> str | None:
    """Return the ending that says a data file's format: `.csv` of `a.csv.gz`; None: no such."""
    name = uncompressed_name(path)
    ending = Path(name).suffix.lower()
    known = TEXT_ENDINGS if name != path.name else (*DIALECTS, *_READERS)
    return ending if ending in known else None


def read_file(path: Path, dialect: Dialect = NO_DIALECT) -> Rows:
    """Yield the rows of one data file, in order.

    Args:
        dialect: of csv and tsv files, as far as it is given.

    Raises:
        ValueError: the ending is unknown, or the content has another format.
        OSError: it cannot be read.
    """
    ending = ending_of(path)
    if ending is None:
        raise ValueError(f"{path}: unknown ending '{path.suffix}'; known: {KNOWN_ENDINGS}.")
    if ending in DIALECTS:
        yield from read_csv(path, dialect, DIALECTS[ending])
    else:
        yield from _READERS[ending](path)
