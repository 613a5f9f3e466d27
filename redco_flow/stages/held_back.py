"""Rows that must be seen as a whole before they are encoded, kept in files meanwhile.

All rows are where a tokenizer is to be trained on them; those of an evaluation split are where
rows with the same source become one example.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path

from redco_flow.stages.arrow_split import TEXT, ArrowSplit, SplitWriter, read_batches
from redco_flow.stages.data_source import SPLITS
from redco_flow.stages.dataset_artifact import split_path
from redco_flow.stages.grouping import Batch, grouped, ungrouped
from redco_flow.stages.text_pairs import PairBatch

_COLUMNS = {"row_id": TEXT, "source": TEXT, "target": TEXT}


class HeldBackRows:
    """Some splits' rows, in one file each.

    Args:
        folder: where the files go.
        splits: those to hold back.
        grouped_splits: those of which each source is to be one example.
    """

    def __init__(
        self, folder: Path, splits: frozenset[str], grouped_splits: frozenset[str]
    ) -> None:
        self._folder = folder
        self._splits = splits
        self._grouped = grouped_splits
        self.num_rows: Counter[str] = Counter()

    def take_from(self, pairs: Iterable[tuple[str, PairBatch]]) -> Iterator[tuple[str, Batch]]:
        """Write what is to be held back and yield the rest, to be encoded now."""
        with ExitStack() as stack:
            writers: dict[str, SplitWriter] = {}
            for split, batch in pairs:
                if split not in self._splits:
                    yield split, ungrouped(batch)
                    continue
                if split not in writers:
                    writer = SplitWriter(split_path(self._folder, split), _COLUMNS)
                    writers[split] = stack.enter_context(writer)
                writers[split].write(batch)
                self.num_rows[split] += len(batch["row_id"])

    def pairs(self, split: str) -> Iterator[PairBatch]:
        """Yield one split's rows as they were read."""
        return read_batches(split_path(self._folder, split))

    def examples(self) -> Iterator[tuple[str, Batch]]:
        """Yield what was held back, split by split."""
        for split in SPLITS:
            if not self.num_rows[split]:
                continue
            if split in self._grouped:
                batches = grouped(ArrowSplit(split_path(self._folder, split)))
            else:
                batches = map(ungrouped, self.pairs(split))
            for batch in batches:
                yield split, batch
