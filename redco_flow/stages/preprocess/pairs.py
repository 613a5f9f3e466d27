"""Turn raw rows into pairs of source and target text, spread over the splits.

Knows which fields matter, what a usable text is, how rows are held out, and where one block of
rows ends and the next begins. What else a row may become, `rows` knows.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

from redco_flow.spec.pipeline import DataSection
from redco_flow.stages.artifacts.arrow_split import BATCH_ROWS, TEXT, ArrowSplit
from redco_flow.stages.data.row_values import BadValue
from redco_flow.stages.data.rows import BadRow, BadRowLog, FileRow, problem_of_text
from redco_flow.stages.data.source import Source
from redco_flow.stages.data.splits import SPLITS
from redco_flow.stages.preprocess.heads import chat_columns, text_keys
from redco_flow.stages.preprocess.labels import Labels
from redco_flow.text.conversations import BadConversation
from redco_flow.text.pairs import PAIR_SEPARATOR

BLOCK_ROWS = 20 * BATCH_ROWS
"""Rows as they are in the data, usable or not, that are encoded and kept together."""

RAW_COLUMNS = {"row_id": TEXT, "source": TEXT, "target": TEXT, "part": TEXT}

PairBatch = dict[str, list[Any]]
"""What was made of rows, column by column: RAW_COLUMNS of pairs."""

SplitOf = Callable[[bytes], str]
"""From what makes a row the same as another to its split."""


class BlockSplit(NamedTuple):
    """One split's share of one block of rows; blocks count from 0 in reading order."""

    block: int
    split: str


@dataclass
class RowCounts:
    """Rows of all sources, usable or not; the usable ones that are kept, by split; those that a
    curation leaves out, by reason.
    """

    rows: int = 0
    usable: Counter[str] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)

    @property
    def num_blocks(self) -> int:
        """The number of blocks that the rows make."""
        return -(-self.rows // BLOCK_ROWS)


class TextPair(NamedTuple):
    """One usable row.

    Args:
        block, split: where it belongs.
        row_id: "file name:line", the same wherever the file lies.
        source: empty where the row is a plain text, which is the target; of two texts both, with
            PAIR_SEPARATOR between them.
        part: of the data; empty where there are no parts.
    """

    block: int
    split: str
    row_id: str
    source: str
    target: str
    part: str = ""


class ReadRow(Protocol):
    """Checks one row and makes of it what is kept: where it belongs, its id, and columns.

    `split_of` tells the split where the source of the data does not.
    """

    def __call__(
        self, row: FileRow, source: Source, split_of: SplitOf | None, block: int
    ) -> Any | BadRow:
        """Return a named tuple that begins with block, split and row_id; or what is wrong."""
        ...


def read_pairs(
    sources: list[Source],
    data: DataSection,
    read_row: ReadRow,
    bad_rows: BadRowLog,
    counts: RowCounts,
    on_row: Callable[[], None],
    is_wanted: Callable[[int], bool],
    left_out: Mapping[str, str],
) -> Iterator[Any]:
    """Yield what is made of the usable rows of the wanted blocks, in reading order.

    All rows are read and checked, so limits and bad rows are the same whatever is wanted.

    Args:
        bad_rows: gets the rows that cannot be used, of all blocks.
        counts: gets the numbers of all blocks.
        on_row: called once for each row read, good or bad: progress, and the place to stop.
        is_wanted: takes a block's number.
        left_out: rows that are usable and not wanted: id to reason.
    """
    split_of_train = _held_out(sources, data)
    num_read = Counter[tuple[str, str]]()
    for source in sources:
        split_of = split_of_train if source.split == "train" else None
        for row in source.rows():
            on_row()
            if num_read[source.split, source.part] == data.max_examples:
                break
            block = counts.rows // BLOCK_ROWS
            counts.rows += 1
            pair = row if isinstance(row, BadRow) else read_row(row, source, split_of, block)
            if isinstance(pair, BadRow):
                bad_rows.add(pair)
                continue
            num_read[source.split, source.part] += 1
            if (reason := left_out.get(pair.row_id)) is not None:
                counts.left_out[reason] += 1
                continue
            counts.usable[pair.split] += 1
            if is_wanted(block):
                yield pair


def batches_by_block(pairs: Iterable[Any]) -> Iterator[tuple[BlockSplit, PairBatch]]:
    """Yield the rows of each block and split column by column, BATCH_ROWS at a time, in order.

    A split's last batch of a block may be shorter; it comes when the block's pairs have been read.
    """
    waiting: dict[str, PairBatch] = {}
    block = 0
    for pair in pairs:
        block_of_pair, split, *values = pair
        if block_of_pair != block:
            yield from _rest(block, waiting)
            block = block_of_pair
        batch = waiting.get(split)
        if batch is None:
            batch = waiting[split] = {name: [] for name in pair._fields[2:]}
        for column, value in zip(batch.values(), values, strict=True):
            column.append(value)
        if len(batch["row_id"]) == BATCH_ROWS:
            yield BlockSplit(block, split), waiting.pop(split)
    yield from _rest(block, waiting)


def _rest(block: int, waiting: dict[str, PairBatch]) -> Iterator[tuple[BlockSplit, PairBatch]]:
    """Take out what is left of a block."""
    for split in sorted(waiting, key=SPLITS.index):
        yield BlockSplit(block, split), waiting.pop(split)


def read_pairs_of(data: DataSection, labels: Labels | None = None) -> ReadRow:
    """Return what makes pairs of rows with texts.

    Args:
        labels: reads the targets that are not texts; as text they replace them.
    """
    keys = text_keys(data, are_labelled=labels is not None)

    def read_row(
        row: FileRow, source: Source, split_of: SplitOf | None, block: int
    ) -> TextPair | BadRow:
        line, fields = row
        for key in (*keys, *([data.part_key] if data.part_key else [])):
            if problem := problem_of_text(fields, key):
                return BadRow(f"{source.location}:{line}", *problem)
        part = fields[data.part_key] if data.part_key else source.part
        texts = [fields[key] for key in keys]
        if labels is not None:
            try:
                texts.append(str(labels.read(fields, data.target_key, source)))
            except BadValue as error:
                return BadRow(f"{source.location}:{line}", error.reason, error.detail)
        first = PAIR_SEPARATOR.join(texts[:-1] or texts)
        split = split_of(first.encode()) if split_of else source.split
        row_id = f"{source.name}:{line}"
        return TextPair(block, split, row_id, "" if data.text_key else first, texts[-1], part)

    return read_row


def read_chats_of(data: DataSection) -> ReadRow:
    """Return what makes pairs of rows with conversations: one as JSON, and its last answer."""
    columns = chat_columns(data)

    def read_row(
        row: FileRow, source: Source, split_of: SplitOf | None, block: int
    ) -> TextPair | BadRow:
        try:
            chat = columns.read(row.fields)
        except BadConversation as error:
            return BadRow(f"{source.location}:{row.line}", error.reason, error.detail)
        split = source.split
        if split_of:  # equal questions stay together, whatever the answers
            split = split_of(replace(chat, messages=chat.messages[:-1]).to_json().encode())
        answer = str(chat.messages[-1].get("content", ""))
        return TextPair(block, split, f"{source.name}:{row.line}", chat.to_json(), answer)

    return read_row


def parts_of(data: DataSection) -> dict[str, float] | None:
    """Return `DatasetSummary.parts`."""
    if not data.mixture and data.part_key is None:
        return None
    return {name: part.weight for name, part in data.mixture.items()}


def _held_out(sources: list[Source], data: DataSection) -> SplitOf:
    """A function from a training row's source, or all of it, to its split; equals stay together."""
    given = {source.split for source in sources}
    test = 0.0 if "test" in given else data.test_fraction
    validation = 0.0 if "validation" in given else data.validation_fraction
    if test + validation == 0:
        return lambda _: "train"

    def split_of(source: bytes) -> str:
        # A hash, not a random number: the split survives reordering and added rows.
        head = hashlib.sha256(source).digest()[:8]
        share = int.from_bytes(head, "big") / 2**64
        if share < test:
            return "test"
        return "validation" if share < test + validation else "train"

    return split_of


Batch = dict[str, list[Any]]


def ungrouped(batch: PairBatch) -> Batch:
    """Return a batch of examples with one reference each."""
    return {
        "row_id": batch["row_id"],
        "source": batch["source"],
        "references": [[target] for target in batch["target"]],
        "part": batch["part"],
    }


def grouped(rows: ArrowSplit) -> Iterator[Batch]:
    """Yield batches of examples, one per distinct source, in the order of their first rows.

    An example's id is that of its first row; its references are in row order, each once.
    """
    groups: dict[bytes, list[int]] = {}
    index = 0
    for batch in rows.batches():
        for source in batch["source"]:
            groups.setdefault(hashlib.sha256(source.encode()).digest(), []).append(index)
            index += 1
    members = list(groups.values())
    for start in range(0, len(members), BATCH_ROWS):
        yield _examples(rows, members[start : start + BATCH_ROWS])


def _examples(rows: ArrowSplit, members: list[list[int]]) -> Batch:
    batch: Batch = {"row_id": [], "source": [], "references": [], "part": []}
    for indices in members:
        group = rows.__getitems__(indices)
        batch["row_id"].append(group[0]["row_id"])
        batch["source"].append(group[0]["source"])
        batch["part"].append(group[0]["part"])
        batch["references"].append(list(dict.fromkeys(row["target"] for row in group)))
    return batch
