"""Read rows from Parquet files and Arrow IPC files, in batches whose bytes are limited.

A dictionary-encoded column has each value once, however many rows repeat it: a file of 500 bytes
may have gigabytes of text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from redco_flow.engine.files import reading
from redco_flow.stages.data.rows import FileRow, Rows

_BATCH_ROWS = 1000
_BATCH_BYTES = 64 << 20
_FEW_ROWS = 16  # fewer make reading slow where a dictionary is large, its values short
_ARROW_FILE_MAGIC = b"ARROW1"


def read_parquet(
    path: Path, choose: Callable[[Any], tuple[Sequence[str], Sequence[int]]] | None = None
) -> Rows:
    """Yield the rows of a Parquet file; raises UnreadableFile where it is none.

    Args:
        choose: from the opened file to the columns and the row groups to read; None: all.
    """
    import pyarrow.parquet

    what = "a Parquet file"
    with ExitStack() as stack:
        with reading(path, what):
            file = stack.enter_context(pyarrow.parquet.ParquetFile(path))
            columns, groups = choose(file) if choose else (None, range(file.num_row_groups))
        yield from _rows_of(_parquet_batches(file, columns, groups), path, what)


def _parquet_batches(
    file: Any, columns: Sequence[str] | None, groups: Sequence[int]
) -> Iterator[Any]:
    for index in groups:
        num_rows = _rows_of_batch(file.metadata.row_group(index))
        yield from file.iter_batches(batch_size=num_rows, row_groups=[index], columns=columns)


def _rows_of_batch(group: Any) -> int:
    """Return how many rows of a row group to decode at once."""
    num_rows = _BATCH_BYTES // max(1, group.total_byte_size // max(1, group.num_rows))
    columns = map(group.column, range(group.num_columns))
    in_dictionaries = sum(
        one.total_uncompressed_size
        for one in columns
        if one.has_dictionary_page and one.physical_type == "BYTE_ARRAY"
    )
    if in_dictionaries:  # each row may have the largest value
        num_rows = min(num_rows, max(_FEW_ROWS, _BATCH_BYTES // in_dictionaries))
    return int(max(1, min(num_rows, _BATCH_ROWS)))


def read_arrow(path: Path) -> Rows:
    """Yield the rows of an IPC stream or file; raises UnreadableFile where it is neither."""
    import pyarrow as pa

    what = "an Arrow file"
    # Read, not mapped: a mapped file that is cut short while it is read ends the process.
    with pa.OSFile(str(path), "rb") as source:
        with reading(path, what):
            batches = _arrow_batches(source)
        yield from _rows_of(batches, path, what)


def _arrow_batches(source: Any) -> Iterator[Any]:
    """Open a stream of record batches, or a file of them."""
    import pyarrow as pa

    magic = source.read(len(_ARROW_FILE_MAGIC))
    source.seek(0)
    if magic != _ARROW_FILE_MAGIC:
        return iter(pa.ipc.open_stream(source))
    file = pa.ipc.open_file(source)
    return (file.get_batch(index) for index in range(file.num_record_batches))


def _rows_of(batches: Iterator[Any], path: Path, what: str) -> Iterator[FileRow]:
    """Yield the rows of record batches that are what they say.

    A batch of a damaged file may point anywhere in memory: nothing of it is looked at before.
    """
    line = 0
    while True:
        with reading(path, what):
            batch = next(batches, None)
            if batch is None:
                return
            batch.validate(full=True)
            num_rows = _rows_of_slice(batch)
        for start in range(0, batch.num_rows, num_rows):
            with reading(path, what):
                rows = batch.slice(start, num_rows).to_pylist()
            for fields in rows:
                line += 1
                yield FileRow(line, fields)


def _rows_of_slice(batch: Any) -> int:
    """Return how many rows of a batch to make Python values of at once."""
    num_bytes = sum(_bytes_of_row(column) for column in batch.columns)
    return max(1, min(_BATCH_ROWS, _BATCH_BYTES // max(1, num_bytes)))


def _bytes_of_row(column: Any) -> int:
    """Return how many bytes a row has, in a dictionary the largest value."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if not pa.types.is_dictionary(column.type):
        return int(column.nbytes) // max(1, len(column))
    try:
        return int(pc.max(pc.binary_length(column.dictionary)).as_py() or 0)
    except pa.ArrowNotImplementedError:  # values of a fixed size
        return 8
