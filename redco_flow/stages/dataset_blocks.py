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
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from redco_flow.records import digest_file, read_json, read_json_if_present, sync, write_json
from redco_flow.stages.dataset_artifact import split_file
from redco_flow.stages.text_pairs import BlockSplit

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
class Block:
    """What a block's record says.

    Args:
        files: none where the block has no usable row.
        counts: of the encoded examples by split: see `DatasetSummary.splits`.
    """

    files: tuple[BlockFile, ...]
    counts: Mapping[str, Mapping[str, int]]


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

    def finish(self, path: Path, folder: str, place: BlockSplit) -> BlockFile:
        """Give a written file its name, durably."""
        name = split_file(place.split, place.block)
        file = BlockFile(folder, place.split, name, path.stat().st_size, digest_file(path))
        sync(path)
        os.replace(path, self._root / folder / name)
        sync(self._root / folder)
        return file

    def commit(self, number: int, block: Block) -> None:
        """Write a block's record: from here on it is there."""
        write_json(self._record_path(number), asdict(block))

    def read(self, number: int) -> Block:
        """Return a block's record.

        Raises:
            FileNotFoundError: the block is not there.
        """
        record = read_json(self._record_path(number))
        return Block(tuple(BlockFile(**file) for file in record["files"]), record["counts"])

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
