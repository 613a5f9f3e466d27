"""Splits of examples in Arrow files: written by column, read by row, in batches, by lengths."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from redco_flow.engine.files import reading
from redco_flow.stages.data.row_values import unpack_row
from redco_flow.text.tokenizer import FlatIds

BATCH_ROWS = 1000
_WHAT = "a split of examples with these columns"
TEXT = "string"
TEXTS = "texts"
IDS = "ids"
BYTES = "bytes"

_FEATURES: Mapping[str, Any] = {
    TEXT: {"dtype": "string", "_type": "Value"},
    TEXTS: {"feature": {"dtype": "string", "_type": "Value"}, "_type": "List"},
    IDS: {"feature": {"dtype": "int32", "_type": "Value"}, "_type": "List"},
    BYTES: {"dtype": "large_binary", "_type": "Value"},
}


class SplitWriter:
    """Write rows column by column into one file; a context manager.

    Args:
        path: replaced if it exists.
        columns: TEXT, TEXTS, IDS or BYTES by column name.
    """

    def __init__(self, path: Path, columns: Mapping[str, str]) -> None:
        self.num_rows = 0
        self._path = path
        self._columns = dict(columns)
        self._pending: dict[str, list[Any] | FlatIds] = {
            name: FlatIds() if kind == IDS else [] for name, kind in columns.items()
        }

    def __enter__(self) -> Self:
        import pyarrow as pa

        self._schema = _schema(self._columns)
        self._sink = pa.OSFile(str(self._path), "wb")
        self._stream = pa.ipc.new_stream(self._sink, self._schema)
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        if error_type is None:
            self._flush(1)
        self._stream.close()
        self._sink.close()

    def write(self, rows: Mapping[str, Any]) -> None:
        """Append rows, given as equally long columns; ids as `FlatIds`, or any lists of them.

        Raises:
            ValueError: a value of a column of texts is not a text; names the row and the column.
        """
        counts = {len(rows[name]) for name in self._columns}
        assert len(counts) == 1, f"columns of unequal lengths: {counts}"
        for name, kind in self._columns.items():
            if kind in (TEXT, TEXTS):
                self._check_texts(name, rows[name])
        for name, pending in self._pending.items():
            pending.extend(rows[name])
        self.num_rows += counts.pop()
        self._flush(BATCH_ROWS)

    def _check_texts(self, name: str, values: Sequence[Any]) -> None:
        for row, value in enumerate(values, self.num_rows):
            for text in (value,) if self._columns[name] == TEXT else value:
                if not isinstance(text, str):
                    raise ValueError(
                        f"row {row} of {self._path.name} has {text!r} in the column '{name}', "
                        "which holds texts."
                    )

    def _flush(self, at_least: int) -> None:
        import pyarrow as pa

        while len(next(iter(self._pending.values()))) >= at_least:
            head = [
                _array(_take_first(self._pending[column.name]), column.type)
                for column in self._schema
            ]
            self._stream.write_batch(pa.RecordBatch.from_arrays(head, schema=self._schema))


class ArrowSplit(Sequence[dict[str, Any]]):
    """The rows of some files, one after the other, read on demand; token ids are int32 arrays.

    Args:
        paths: written by SplitWriter, with the same columns; at least one.
        columns: which to read; all of them by default.

    Raises:
        ValueError: no Arrow file, or a column that it has not.
    """

    def __init__(self, paths: Sequence[Path], columns: Sequence[str] | None = None) -> None:
        self._paths = tuple(paths)
        tables = [_mapped(path, columns) for path in paths]
        self._columns = tables[0].schema.names
        self._batches = [batch for table in tables for batch in table.to_batches()]
        self._starts = np.cumsum([0, *(batch.num_rows for batch in self._batches)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.__getitems__(range(*index.indices(len(self))))
        if index < 0:
            index += len(self)
        if not 0 <= index < len(self):
            raise IndexError(f"{self._paths[0].parent}: row {index} of {len(self)}.")
        position = int(np.searchsorted(self._starts, index, side="right")) - 1
        batch, row = self._batches[position], int(index - self._starts[position])
        return {
            name: _value(batch.column(column), row)
            for column, name in enumerate(batch.schema.names)
        }

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Return several rows, in the given order."""
        return [self[int(index)] for index in indices]

    def lengths(self, column: str) -> NDArray[np.int64]:
        """Return how many entries each row's list has, without reading the lists."""
        import pyarrow.compute as pc

        parts = [pc.list_value_length(batch.column(column)) for batch in self._batches]
        return np.concatenate([np.zeros(0, np.int64), *map(_as_numpy, parts)])

    def flat(self, column: str) -> list[NDArray[np.int32]]:
        """Return the lists of ids of all rows one after the other, in pieces that stay mapped."""
        parts = (batch.column(column).flatten() for batch in self._batches)
        return [_as_numpy(part) for part in parts]

    def runs(self, column: str) -> list[tuple[str, int]]:
        """Return the texts of a column in order, equal neighbours once with their number."""
        import pyarrow as pa
        import pyarrow.compute as pc

        found: list[tuple[str, int]] = []
        for batch in self._batches:
            encoded = pc.run_end_encode(batch.column(column), run_end_type=pa.int64())
            start = 0
            for text, end in zip(encoded.values.to_pylist(), encoded.run_ends, strict=True):
                count, start = end.as_py() - start, end.as_py()
                if found and found[-1][0] == text:
                    count += found.pop()[1]
                found.append((text, count))
        return found

    def batches(self) -> Iterator[dict[str, list[Any]]]:
        """Yield the rows column by column, BATCH_ROWS at a time, in order."""
        for path in self._paths:
            yield from read_batches(path, self._columns)


class RowSplit(Sequence[dict[str, Any]]):
    """The rows of a split that are kept as they are; each has its `row_id` and token ids too.

    Args:
        packed: what is stored of them.
        added: further columns, a value for each row.

    Raises:
        ValueError: a further column is of another number of rows.
    """

    def __init__(self, packed: ArrowSplit, added: Added | None = None) -> None:
        self._packed = packed
        self._added = dict(added or {})
        for name, values in self._added.items():
            if len(values) != len(packed):
                raise ValueError(f"{len(values)} values of '{name}' for {len(packed)} rows.")

    def __len__(self) -> int:
        return len(self._packed)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.__getitems__(range(*index.indices(len(self))))
        packed = self._packed[index]
        row = unpack_row(packed.pop("row"))
        return packed | row | {name: values[index] for name, values in self._added.items()}

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Return several rows, in the given order."""
        return [self[int(index)] for index in indices]

    def lengths(self, column: str) -> NDArray[np.int64]:
        """Return how many token ids of a column each row has."""
        return self._packed.lengths(column)


Added = Mapping[str, Sequence[Any]]
"""Further columns of a split's rows, by name."""

Examples = ArrowSplit | RowSplit


def read_batches(path: Path, columns: Sequence[str]) -> Iterator[dict[str, list[Any]]]:
    """Yield some columns of a file's rows, at most BATCH_ROWS at a time, in order.

    Read, not mapped: pages of a mapped file count as this process's memory once touched.
    """
    import pyarrow as pa

    with pa.OSFile(str(path), "rb") as source:
        with reading(path, _WHAT):
            batches = pa.ipc.open_stream(source)
        while True:
            with reading(path, _WHAT):
                batch = next(batches, None)
                if batch is None:
                    return
                batch.validate(full=True)
                rows = {name: batch.column(name).to_pylist() for name in columns}
            yield rows


def _mapped(path: Path, columns: Sequence[str] | None) -> Any:
    """Open a file; that its bytes are what was published is for the caller to know."""
    import pyarrow as pa

    with reading(path, _WHAT):
        with pa.memory_map(str(path)) as source:
            table = pa.ipc.open_stream(source).read_all()
        chosen = table if columns is None else table.select(list(columns))
        chosen.validate()
    return chosen


def _value(column: Any, row: int) -> Any:
    import pyarrow as pa

    scalar = column[row]
    if pa.types.is_list(column.type) and pa.types.is_int32(column.type.value_type):
        return _as_numpy(scalar.values)
    return scalar.as_py()


def _as_numpy(column: Any) -> Any:
    """Return a column of integers without a copy; pyarrow's own way imports pandas (0.5 s)."""
    return np.from_dlpack(column)


def _take_first(pending: list[Any] | FlatIds) -> list[Any] | FlatIds:
    """Take a record batch's rows out of a column."""
    if isinstance(pending, FlatIds):
        return pending.take_first(BATCH_ROWS)
    taken = pending[:BATCH_ROWS]
    del pending[:BATCH_ROWS]
    return taken


def _array(values: Sequence[Any] | FlatIds, column_type: Any) -> Any:
    """Return one column; the ids of FlatIds are not copied. `pa.array` would import pandas."""
    import pyarrow as pa

    if isinstance(values, FlatIds):
        ids = pa.Array.from_buffers(pa.int32(), len(values.ids), [None, pa.py_buffer(values.ids)])
        parts, buffers = [ids], [None, pa.py_buffer(values.offsets)]
    elif pa.types.is_list(column_type):
        parts = [_array([text for texts in values for text in texts], column_type.value_type)]
        buffers = [None, _offsets(values, np.int32)]
    else:
        is_text = pa.types.is_string(column_type)
        encoded = [value.encode() for value in values] if is_text else values
        offsets = _offsets(encoded, np.int32 if is_text else np.int64)
        parts, buffers = [], [None, offsets, pa.py_buffer(b"".join(encoded))]
    return pa.Array.from_buffers(column_type, len(values), buffers, children=parts)


def _offsets(values: Sequence[Any], width: type[np.integer[Any]]) -> Any:
    """Return where each value begins, and where the last one ends."""
    import pyarrow as pa

    ends = np.cumsum([0, *map(len, values)])
    if ends[-1] > np.iinfo(width).max:
        raise ValueError(f"{len(values)} rows have {ends[-1]} bytes of text, above 2 GiB.")
    return pa.py_buffer(ends.astype(width))


def _schema(columns: Mapping[str, str]) -> Any:
    import pyarrow as pa

    types = {
        TEXT: pa.string(),
        TEXTS: pa.list_(pa.string()),
        IDS: pa.list_(pa.int32()),
        BYTES: pa.large_binary(),
    }
    features = {name: _FEATURES[kind] for name, kind in columns.items()}
    return pa.schema(
        [(name, types[kind]) for name, kind in columns.items()],
        metadata={"huggingface": json.dumps({"info": {"features": features}})},
    )
