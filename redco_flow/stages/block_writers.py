"""Write blocks as their encoded batches come, and count what is in them.

Knows what the summary says of a split. Batches come in the order of their blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from redco_flow.stages.arrow_split import SplitWriter
from redco_flow.stages.data_source import SPLITS
from redco_flow.stages.dataset_artifact import COLUMNS
from redco_flow.stages.dataset_blocks import DATASET, HELD_BACK, Block, BlockStore
from redco_flow.stages.grouping import Batch
from redco_flow.stages.text_pairs import RAW_COLUMNS, BlockSplit, PairBatch


class SplitCounts:
    """What the summary says of the examples of each split, summed up."""

    def __init__(self) -> None:
        self._of: dict[str, Counter[str]] = {}

    def add_batch(self, split: str, batch: Batch, encoded: Any) -> None:
        """Count examples with their `EncodedPairs`."""
        counted = {"rows": len(batch["row_id"]), "references": sum(map(len, batch["references"]))}
        for side in ("source", "target"):
            lengths = getattr(encoded, f"{side}_ids").lengths()
            counted[f"{side}_tokens"] = sum(lengths)
            counted[f"cut_{side}s"] = sum(getattr(encoded, f"is_{side}_cut"))
            counted[f"longest_{side}"] = max(lengths, default=0)
        self.add(split, counted)

    def add(self, split: str, counted: Mapping[str, int]) -> None:
        """Add what was counted elsewhere."""
        counts = self._of.setdefault(split, Counter())
        for name, value in counted.items():
            is_maximum = name.startswith("longest_")
            counts[name] = max(counts[name], value) if is_maximum else counts[name] + value

    def num_rows(self, split: str) -> int:
        """Return how many examples of a split were counted."""
        return self._of[split]["rows"] if split in self._of else 0

    def by_split(self) -> dict[str, dict[str, int]]:
        """Return the counts of every split that has examples."""
        return {split: dict(self._of[split]) for split in SPLITS if split in self._of}


@dataclass
class _OpenBlock:
    """A block that is being written: its open files by folder and split."""

    stack: ExitStack = field(default_factory=ExitStack)
    files: dict[tuple[str, str], tuple[Path, SplitWriter]] = field(default_factory=dict)
    counts: SplitCounts = field(default_factory=SplitCounts)


class BlockWriters:
    """Writers of the blocks that are at work; a context manager.

    A block is committed when a later one's batch comes, and the last one at the end.
    """

    def __init__(self, store: BlockStore) -> None:
        self._store = store
        self._open: dict[int, _OpenBlock] = {}
        self.committed: set[int] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error_type: type[BaseException] | None, *error: Any) -> None:
        if error_type is None:
            self._commit_before(None)
        for block in self._open.values():
            block.stack.__exit__(error_type, *error)

    def write(self, place: BlockSplit, batch: Batch, encoded: Any) -> None:
        """Append examples with their `EncodedPairs`."""
        self._commit_before(place.block)
        self._writer(DATASET, place, COLUMNS).write(
            {**batch, "source_ids": encoded.source_ids, "target_ids": encoded.target_ids}
        )
        self._open[place.block].counts.add_batch(place.split, batch, encoded)

    def hold_back(self, place: BlockSplit, batch: PairBatch) -> None:
        """Append rows that are to be encoded when all blocks are there."""
        self._writer(HELD_BACK, place, RAW_COLUMNS).write(batch)

    def _writer(self, folder: str, place: BlockSplit, columns: Mapping[str, str]) -> SplitWriter:
        block = self._open.setdefault(place.block, _OpenBlock())
        key = (folder, place.split)
        if key not in block.files:
            path = self._store.new_file()
            block.files[key] = path, block.stack.enter_context(SplitWriter(path, columns))
        return block.files[key][1]

    def _commit_before(self, number: int | None) -> None:
        """Commit the blocks before this one; None: all."""
        for done in sorted(self._open):
            if number is None or done < number:
                self._commit(done)

    def _commit(self, number: int) -> None:
        block = self._open[number]
        block.stack.close()
        files = tuple(
            self._store.finish(path, folder, BlockSplit(number, split))
            for (folder, split), (path, _) in sorted(block.files.items())
        )
        self._store.commit(number, Block(files, block.counts.by_split()))
        del self._open[number]
        self.committed.add(number)
