"""Turn raw rows into pairs of source and target text, spread over the splits.

Knows which fields matter, what a usable text is, how sources are held out, and where one block of
rows ends and the next begins.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from redco_flow.spec.pipeline import DataSection
from redco_flow.stages.arrow_split import BATCH_ROWS, TEXT
from redco_flow.stages.bad_rows import BadRow, BadRowLog, problem_of_text
from redco_flow.stages.data_source import SPLITS, Source
from redco_flow.stages.row_files import FileRow

BLOCK_ROWS = 20 * BATCH_ROWS
"""Rows as they stand in the data, usable or not, that are encoded and kept together."""

RAW_COLUMNS = {"row_id": TEXT, "source": TEXT, "target": TEXT}

PairBatch = dict[str, list[str]]
"""Pairs column by column: RAW_COLUMNS."""

SplitOf = Callable[[str], str]
"""From a source text to its split."""


class BlockSplit(NamedTuple):
    """One split's share of one block of rows; blocks count from 0 in reading order."""

    block: int
    split: str


@dataclass
class RowCounts:
    """What was read: rows of all sources, usable or not, and the usable ones by split."""

    rows: int = 0
    usable: Counter[str] = field(default_factory=Counter)

    @property
    def num_blocks(self) -> int:
        """How many blocks the rows make."""
        return -(-self.rows // BLOCK_ROWS)


class TextPair(NamedTuple):
    """One usable row.

    Args:
        block, split: where it belongs.
        row_id: "file name:line", the same wherever the file lies.
        source: empty where the row is a plain text, which is the target.
    """

    block: int
    split: str
    row_id: str
    source: str
    target: str


def read_pairs(
    sources: list[Source],
    data: DataSection,
    bad_rows: BadRowLog,
    counts: RowCounts,
    on_row: Callable[[], None],
    is_wanted: Callable[[int], bool],
) -> Iterator[TextPair]:
    """Yield the usable rows of the wanted blocks, in reading order.

    All rows are read and checked, so limits and bad rows are the same whatever is wanted.

    Args:
        bad_rows: gets the rows that cannot be used, of all blocks.
        counts: gets the numbers of all blocks.
        on_row: called once for each row read, good or bad: progress, and the place to stop.
        is_wanted: takes a block's number.
    """
    split_of_train = _held_out(sources, data)
    num_read = dict.fromkeys(SPLITS, 0)
    for source in sources:
        split_of = split_of_train if source.split == "train" else None
        for row in source.rows():
            on_row()
            if num_read[source.split] == data.max_examples:
                break
            block = counts.rows // BLOCK_ROWS
            counts.rows += 1
            pair = _pair(row, source, data, split_of, block)
            if isinstance(pair, BadRow):
                bad_rows.add(pair)
                continue
            num_read[source.split] += 1
            counts.usable[pair.split] += 1
            if is_wanted(block):
                yield pair


def batches_by_place(pairs: Iterable[TextPair]) -> Iterator[tuple[BlockSplit, PairBatch]]:
    """Yield the pairs of each block and split column by column, BATCH_ROWS at a time, in order.

    A split's last batch of a block may be shorter; it comes when the block's pairs have been read.
    """
    waiting: dict[str, PairBatch] = {}
    block = 0
    for block_of_pair, split, row_id, source, target in pairs:
        if block_of_pair != block:
            yield from _rest(block, waiting)
            block = block_of_pair
        batch = waiting.get(split)
        if batch is None:
            batch = waiting[split] = {"row_id": [], "source": [], "target": []}
        batch["row_id"].append(row_id)
        batch["source"].append(source)
        batch["target"].append(target)
        if len(batch["row_id"]) == BATCH_ROWS:
            yield BlockSplit(block, split), waiting.pop(split)
    yield from _rest(block, waiting)


def _rest(block: int, waiting: dict[str, PairBatch]) -> Iterator[tuple[BlockSplit, PairBatch]]:
    """Take out what is left of a block."""
    for split in sorted(waiting, key=SPLITS.index):
        yield BlockSplit(block, split), waiting.pop(split)


def _pair(
    row: FileRow | BadRow,
    source: Source,
    data: DataSection,
    split_of: SplitOf | None,
    block: int,
) -> TextPair | BadRow:
    """Check one row; `split_of` tells the split where the source of the data does not."""
    if isinstance(row, BadRow):
        return row
    line, fields = row
    keys = (data.text_key,) if data.text_key else (data.source_key, data.target_key)
    for key in keys:
        if problem := problem_of_text(fields, key):
            return BadRow(f"{source.place}:{line}", *problem)
    first, last = fields[keys[0]], fields[keys[-1]]
    split = split_of(first) if split_of else source.split
    row_id = f"{source.name}:{line}"
    return TextPair(block, split, row_id, "" if data.text_key else first, last)


def _held_out(sources: list[Source], data: DataSection) -> SplitOf:
    """A function from a training source, or plain text, to its split; equals stay together."""
    given = {source.split for source in sources}
    test = 0.0 if "test" in given else data.test_fraction
    validation = 0.0 if "validation" in given else data.validation_fraction
    if test + validation == 0:
        return lambda _: "train"

    def split_of(source: str) -> str:
        # A hash, not a random number: the split survives reordering and added rows.
        head = hashlib.sha256(source.encode()).digest()[:8]
        share = int.from_bytes(head, "big") / 2**64
        if share < test:
            return "test"
        return "validation" if share < test + validation else "train"

    return split_of
