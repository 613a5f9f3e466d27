"""Read rows from Parquet files and Arrow IPC files, batch by batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from redco_flow.records import reading
from redco_flow.stages.data.rows import FileRow, Rows

_BATCH_ROWS = 1000
_ARROW_FILE_MAGIC = b"ARROW1"


def read_parquet(path: Path) -> Rows:
    """Yield the rows of a Parquet file; raises UnreadableFile where it is none."""
    import pyarrow.parquet

    what = "a Parquet file"
    with ExitStack() as stack:
        with reading(path, what):
            file = stack.enter_context(pyarrow.parquet.ParquetFile(path))
            batches = file.iter_batches(batch_size=_BATCH_ROWS)
        yield from _rows_of(batches, path, what)


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
        for start in range(0, batch.num_rows, _BATCH_ROWS):
            with reading(path, what):
                rows = batch.slice(start, _BATCH_ROWS).to_pylist()
            for fields in rows:
                line += 1
                yield FileRow(line, fields)
