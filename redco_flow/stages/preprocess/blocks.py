"""A dataset's blocks in a stage's work directory: each is there whole, with its record, or not.

    dataset/train-00003.arrow       a split's encoded examples of block 3
    held_back/test-00003.arrow      rows of block 3 that are encoded when all blocks are there
    blocks/00003.json               written last: the block's files with their digests, its counts
    unfinished/                     files that are being written

Several processes, on several hosts, may write different blocks at once.
"""

from __future__ import annotations

import os
import secrets
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from redco_flow.records import digest_file, read_json, read_json_if_present, sync, write_json
from redco_flow.stages.artifacts.arrow_split import SplitWriter
from redco_flow.stages.artifacts.dataset import SOURCE_IDS, split_file
from redco_flow.stages.data.splits import SPLITS
from redco_flow.stages.preprocess.encoding import Encoded
from redco_flow.stages.preprocess.pairs import RAW_COLUMNS, Batch, BlockSplit, PairBatch

DATASET = "dataset"
HELD_BACK = "held_back"


@dataclass(frozen=True)
class BlockFile:
    """One file of a block.

    Args:
        folder: DATASET or HELD_BACK.
        blake3: of its bytes.
    """

    folder: str
    split: str
    name: str
    bytes: int
    blake3: str


@dataclass(frozen=True)
class EncodedBlock:
    """A block's record.

    Args:
        files: none where the block has no usable row.
        counts: of the encoded examples by split: see `DatasetSummary.splits`.
        unusable: rows that could not be encoded, by reason.
    """

    files: tuple[BlockFile, ...]
    counts: Mapping[str, Mapping[str, int]]
    unusable: Mapping[str, int] = field(default_factory=dict)


class BlockStore:
    """The blocks in one work directory."""

    def __init__(self, work_dir: Path) -> None:
        self._root = work_dir
        self.dataset = work_dir / DATASET
        self._records = work_dir / "blocks"
        self._unfinished = work_dir / "unfinished"
        for folder in (self.dataset, work_dir / HELD_BACK, self._records, self._unfinished):
            folder.mkdir(exist_ok=True)

    def new_file(self) -> Path:
        """Return a path for a file that is to be written; no other process uses it."""
        return self._unfinished / secrets.token_hex(8)

    def finish(self, path: Path, folder: str, block_split: BlockSplit) -> BlockFile:
        """Give a written file its name, durably."""
        name = split_file(block_split.split, block_split.block)
        file = BlockFile(folder, block_split.split, name, path.stat().st_size, digest_file(path))
        sync(path)
        os.replace(path, self._root / folder / name)
        sync(self._root / folder)
        return file

    def commit(self, number: int, block: EncodedBlock) -> None:
        """Write a block's record: from here on it is there."""
        write_json(self._record_path(number), asdict(block))

    def read(self, number: int) -> EncodedBlock:
        """Return a block's record.

        Raises:
            FileNotFoundError: the block is not there.
        """
        record = read_json(self._record_path(number))
        files = tuple(BlockFile(**file) for file in record["files"])
        return EncodedBlock(files, record["counts"], record["unusable"])

    def is_there(self, number: int) -> bool:
        """Tell whether a block has its record and its files, as long as they were."""
        if read_json_if_present(self._record_path(number)) is None:
            return False
        return all(self._size(file) == file.bytes for file in self.read(number).files)

    def is_intact(self, number: int) -> bool:
        """Tell whether a block is there and its files hold what was written; reads them."""
        return self.is_there(number) and all(
            digest_file(self.path_of(file)) == file.blake3 for file in self.read(number).files
        )

    def path_of(self, file: BlockFile) -> Path:
        """Return where a block's file stands."""
        return self._root / file.folder / file.name

    def keep_only(self, names: Iterable[str]) -> None:
        """Remove all but these files from `dataset/`, and what was never finished."""
        strays = {path.name for path in self.dataset.glob("*.arrow")} - set(names)
        for path in [*(self.dataset / name for name in strays), *self._unfinished.iterdir()]:
            path.unlink(missing_ok=True)

    def _record_path(self, number: int) -> Path:
        return self._records / f"{number:05d}.json"

    def _size(self, file: BlockFile) -> int | None:
        try:
            return self.path_of(file).stat().st_size
        except FileNotFoundError:
            return None


def example_columns(batch: Batch, encoded: Any) -> dict[str, Any]:
    """Return examples with their `EncodedPairs` column by column."""
    ids = {"source_ids": encoded.source_ids, "target_ids": encoded.target_ids}
    return {**batch, **ids, **encoded.more}


class SplitCounts:
    """Counts of the examples of each split, summed for the summary."""

    def __init__(self) -> None:
        self._of: dict[str, Counter[str]] = {}

    def add(self, split: str, counted: Mapping[str, int]) -> None:
        """Add what was counted of a batch, or of a block."""
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


def counted_pairs(batch: Batch, encoded: Any) -> dict[str, int]:
    """Count examples with their `EncodedPairs`."""
    counted = {"rows": len(batch["row_id"]), "references": sum(map(len, batch["references"]))}
    for side in ("source", "target"):
        lengths = getattr(encoded, f"{side}_ids").lengths()
        counted[f"{side}_tokens"] = sum(lengths)
        counted[f"cut_{side}s"] = sum(getattr(encoded, f"is_{side}_cut"))
        counted[f"longest_{side}"] = max(lengths, default=0)
    return {**counted, **encoded.counts}


def counted_ids(ids: Mapping[str, Sequence[Sequence[int]]]) -> dict[str, int]:
    """Count the token ids of rows; a row is as long as its source with the longest other column."""
    if not ids:
        return {}
    sources, *targets = ([len(row) for row in ids[name]] for name in sorted(ids, key=_source_first))
    longest = (source + max(row) for source, *row in zip(sources, *targets, strict=True))
    return {
        "source_tokens": sum(sources),
        "target_tokens": sum(map(sum, targets)),
        "longest_row": max(longest),
    }


def _source_first(column: str) -> tuple[bool, str]:
    return column != SOURCE_IDS, column


@dataclass
class _OpenBlock:
    """A block that is being written: its open files by folder and split."""

    stack: ExitStack = field(default_factory=ExitStack)
    files: dict[tuple[str, str], tuple[Path, SplitWriter]] = field(default_factory=dict)
    counts: SplitCounts = field(default_factory=SplitCounts)
    unusable: Counter[str] = field(default_factory=Counter)


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

    def write(self, block_split: BlockSplit, examples: Encoded) -> None:
        """Append examples."""
        self._commit_before(block_split.block)
        if examples.columns["row_id"]:  # all of them may be unusable, or too long
            self._writer(DATASET, block_split, examples.types).write(examples.columns)
        block = self._open.setdefault(block_split.block, _OpenBlock())
        block.counts.add(block_split.split, examples.counts)
        block.unusable.update(reason for _, reason, _ in examples.unusable)

    def hold_back(self, block_split: BlockSplit, batch: PairBatch) -> None:
        """Append rows that are to be encoded when all blocks are there."""
        self._writer(HELD_BACK, block_split, RAW_COLUMNS).write(batch)

    def _writer(
        self, folder: str, block_split: BlockSplit, columns: Mapping[str, str]
    ) -> SplitWriter:
        block = self._open.setdefault(block_split.block, _OpenBlock())
        key = (folder, block_split.split)
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
        unusable = dict(sorted(block.unusable.items()))
        self._store.commit(number, EncodedBlock(files, block.counts.by_split(), unusable))
        del self._open[number]
        self.committed.add(number)
