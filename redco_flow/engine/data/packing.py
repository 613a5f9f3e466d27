"""Pack several examples into one row of tokens, so that little of a batch is padding.

Which examples share a row depends on their lengths alone: a packed row has an index like any
example, so shuffling, sharing out among processes and resuming work as ever.
Dims in this file: B rows, T tokens of a row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from redco_flow.engine.data.batches import Examples, read_rows
from redco_flow.engine.errors import DataError

SEGMENT_IDS, POSITION_IDS = "segment_ids", "position_ids"


def first_fit(
    lengths: Sequence[int] | NDArray[np.integer[Any]], row_length: int
) -> list[list[int]]:
    """Put each example, in order, into the first row with room for it; return rows of indices.

    Time grows with n log n: a tree of the room left finds the row.

    Raises:
        DataError: an example has no token or is longer than a row; the message names it.
    """
    num_leaves = 1 << max(len(lengths) - 1, 0).bit_length()
    # Node i has children 2i and 2i + 1; leaf r is the room in row r, a node that of the roomiest.
    room = [row_length] * (2 * num_leaves)
    rows: list[list[int]] = []
    for index, length in enumerate(lengths):
        if not 1 <= length <= row_length:
            raise DataError(
                f"example {index} has {length} tokens; a packed row takes 1 to {row_length}. "
                "Truncate it before."
            )
        node = 1
        while node < num_leaves:
            node = 2 * node if room[2 * node] >= length else 2 * node + 1
        if node - num_leaves == len(rows):
            rows.append([])
        rows[node - num_leaves].append(index)
        room[node] -= int(length)
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return rows


class PackedExamples:
    """Examples, several to a row: a sequence of lists of examples.

    Args:
        examples: the rows; see `Examples`.
        lengths: tokens of each.
        row_length: T.
        parts: how many examples one after the other share no row with others; empty: all may.

    Attributes:
        row_length: T.
        rows_per_part: how many rows each part takes; they stand side by side.

    Raises:
        DataError: another number of lengths than examples, or one that does not fit a row.
    """

    def __init__(
        self,
        examples: Examples,
        lengths: Sequence[int] | NDArray[np.integer[Any]],
        row_length: int,
        *,
        parts: Sequence[int] = (),
    ) -> None:
        self.row_length = row_length
        counts = parts or [len(lengths)]
        if len(lengths) != len(examples) or sum(counts) != len(examples):
            raise DataError(
                f"{len(lengths)} lengths, and parts of {sum(counts)}, for {len(examples)} examples."
            )
        self.rows: list[list[int]] = []
        self.rows_per_part: list[int] = []
        start = 0
        for count in counts:
            packed = first_fit(lengths[start : start + count], row_length)
            self.rows += [[start + index for index in row] for row in packed]
            self.rows_per_part.append(len(packed))
            start += count
        self._examples = examples

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> list[Any]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[list[Any]]:
        """Return packed rows; all their examples are one read."""
        wanted = [self.rows[index] for index in indices]
        flat = np.asarray([number for row in wanted for number in row], np.int64)
        found = iter(read_rows(self._examples, flat))
        return [[next(found) for _ in row] for row in wanted]


def collate_packed(
    rows: Sequence[Sequence[Mapping[str, Any]]], padding: Mapping[str, int], row_length: int
) -> dict[str, NDArray[np.int32]]:
    """Lay the examples of each packed row side by side.

    Args:
        rows: from `PackedExamples`; each example has one number per token in each column.
        padding: column -> what fills up its rows, as in `{"input_ids": 0, "labels": -100}`.
        row_length: T.

    Returns:
        The columns, `segment_ids` (from 1 in each row, 0 where padding is) and `position_ids`
        (from 0 in each example), int32 (B, T).

    Raises:
        DataError: an example's columns differ in length, or a row is too full.
    """
    shape = (len(rows), row_length)
    arrays = {name: np.full(shape, fill, np.int32) for name, fill in padding.items()}
    arrays |= {name: np.zeros(shape, np.int32) for name in (SEGMENT_IDS, POSITION_IDS)}
    for position, row in enumerate(rows):
        start = 0
        for number, example in enumerate(row, start=1):
            stop = start + _length(example, padding)
            if stop > row_length:
                raise DataError(f"a packed row has {stop} tokens or more; it takes {row_length}.")
            for name in padding:
                arrays[name][position, start:stop] = example[name]
            arrays[SEGMENT_IDS][position, start:stop] = number
            arrays[POSITION_IDS][position, start:stop] = np.arange(stop - start)
            start = stop
    return arrays


def _length(example: Mapping[str, Any], columns: Mapping[str, int]) -> int:
    lengths = {name: len(example[name]) for name in columns}
    if len(set(lengths.values())) != 1:
        raise DataError(f"an example's columns differ in length: {lengths}.")
    return next(iter(lengths.values()))
