"""Rows of token ids, one after the other in one array.

As lists every id would be an object of its own, which the garbage collector walks through and
another process is sent one by one. Nothing but the standard library.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

INT32 = "i"
"""The type of ids in arrays."""


class FlatIds:
    """Rows of int32 ids, of any lengths.

    Args:
        rows: to begin with.

    Attributes:
        ids: of all rows.
        offsets: where in `ids` each row begins, and where the last one ends.

    Raises:
        OverflowError, TypeError: an id is no int32.
    """

    def __init__(self, rows: Iterable[Sequence[int]] = ()) -> None:
        self.ids = array(INT32)
        self.offsets = array(INT32, [0])
        self.extend(rows)

    def append(self, row: Iterable[int]) -> None:
        """Add a row; an int32 array is copied as it is."""
        self.ids.extend(row)
        self.offsets.append(len(self.ids))

    def extend(self, rows: FlatIds | Iterable[Sequence[int]]) -> None:
        """Add rows."""
        if not isinstance(rows, FlatIds):
            for row in rows:
                self.append(row)
            return
        start = len(self.ids)
        self.ids.extend(rows.ids)
        self.offsets.extend(start + end for end in rows.offsets[1:])

    def take_first(self, num_rows: int) -> FlatIds:
        """Take out the first rows, or all where there are fewer, and return them."""
        taken = FlatIds()
        taken.offsets = self.offsets[: num_rows + 1]
        end = taken.offsets[-1]
        taken.ids, self.ids = self.ids[:end], self.ids[end:]
        self.offsets = array(INT32, (offset - end for offset in self.offsets[len(taken) :]))
        return taken

    def lengths(self) -> list[int]:
        """Return how many ids each row has."""
        return [end - start for start, end in pairwise(self.offsets)]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __iter__(self) -> Iterator[list[int]]:
        return (self.ids[start:end].tolist() for start, end in pairwise(self.offsets))


def as_flat(rows: FlatIds | Iterable[Sequence[int]]) -> FlatIds:
    """Return rows as FlatIds."""
    return rows if isinstance(rows, FlatIds) else FlatIds(rows)
