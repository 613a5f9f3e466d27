"""Encoders, a recipe's part in preprocessing: rows in, examples with their counts out.

There are two: `TextEncoder` makes token ids of pairs, plain texts and conversations, `RowEncoder`
keeps rows as they are, with token ids where the recipe has some.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from redco_flow.stages.preprocess.labels import Labels
from redco_flow.stages.preprocess.pairs import BlockSplit, PairBatch, ReadRow

Batches = Iterable[tuple[BlockSplit, PairBatch]]
SplitCount = Mapping[str, Mapping[str, int]]


@dataclass(frozen=True)
class Encoded:
    """A batch of examples as they are written.

    Args:
        columns: of the examples, at least `row_id`.
        types: of the columns that are written.
        counts: of the batch: see `DatasetSummary.splits`.
        unusable: rows that could not be encoded: where they are, reason and detail.
    """

    columns: Mapping[str, Any]
    types: Mapping[str, str]
    counts: Mapping[str, int]
    unusable: Sequence[tuple[str, str, str]] = ()


class Encoder(Protocol):
    """Makes a recipe's examples from rows."""

    @property
    def phase(self) -> str:
        """The phase that the stage reports meanwhile."""
        ...

    @property
    def read_row(self) -> ReadRow:
        """Checks a row and makes of it what is encoded."""
        ...

    @property
    def labels(self) -> Labels | None:
        """Reads the targets that are classes or numbers; None of others."""
        ...

    def encode(self, batches: Batches) -> Generator[tuple[BlockSplit, Encoded], None, None]:
        """Yield each batch's block and split with its examples, in order."""
        ...

    def encode_grouped(self, batches: Batches) -> Generator[tuple[BlockSplit, Encoded], None, None]:
        """Do so with batches of examples that have several references each."""
        ...

    def summary(self, counts: SplitCount, paths: Mapping[str, list[Path]]) -> dict[str, Any]:
        """Return the fields of a `DatasetSummary` that only this encoder knows.

        Args:
            counts: of all blocks by split.
            paths: the dataset's files by split.
        """
        ...

    def first_targets(self, paths: Sequence[Path]) -> list[Any]:
        """Return the targets of the first training examples, at most MAX_COUNTED_TARGETS.

        Args:
            paths: the training split's files.
        """
        ...


MAX_COUNTED_TARGETS = 100_000
