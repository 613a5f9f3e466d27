"""Make one dataset of blocks that are there: no row is copied, its files are the blocks' files.

Only here are all blocks seen together: their digests are checked, counts are summed up, and rows
with the same source are put together where an evaluation split is grouped.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redco_flow.records import write_json
from redco_flow.runtime.context import Output, StageContext, StageOutputs
from redco_flow.stages.artifacts.arrow_split import ArrowSplit, SplitWriter
from redco_flow.stages.artifacts.dataset import TOKENIZER_FOLDER, DatasetSummary, columns_with
from redco_flow.stages.data.rows import BadRowLog, NoRows
from redco_flow.stages.data.splits import SPLITS
from redco_flow.stages.preprocess.blocks import (
    DATASET,
    HELD_BACK,
    BlockFile,
    BlockStore,
    EncodedBlock,
    SplitCounts,
)
from redco_flow.stages.preprocess.config import Config
from redco_flow.stages.preprocess.encoding import ExampleEncoder, load_tokenizer
from redco_flow.stages.preprocess.labels import are_ordered, class_names, tell_missing_classes
from redco_flow.stages.preprocess.pairs import Batch, BlockSplit, RowCounts, grouped, parts_of
from redco_flow.stages.preprocess.texts import learnt_pieces, tell_learnt
from redco_flow.tracking import row_counts
from redco_flow.tracking.dataset_rows import SUMMARY_FILE

_NUM_SHOWN = 3

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EncodedBlocks:
    """The result of one pass over the rows.

    Args:
        counts: of all blocks.
        written: the blocks that were written.
        bad_rows: of all blocks: those that could not be read.
        unusable: of the blocks that were written: those that could not be encoded.
    """

    counts: RowCounts
    written: set[int]
    bad_rows: BadRowLog
    unusable: BadRowLog

    def bad_rows_of(self, blocks: Iterable[EncodedBlock]) -> BadRowLog:
        """Return the bad rows of all blocks; shown are those that this process found."""
        unusable = BadRowLog(self.bad_rows.policy, self.unusable.first)
        for block in blocks:
            unusable.counts.update(block.unusable)
        return self.bad_rows.joined(unusable)


def _row_metadata(summary: DatasetSummary, read: RowCounts) -> dict[str, Any]:
    """Return what a dataset's manifest says of its rows, after it was logged."""
    metadata = {
        "splits": summary.splits,
        "skipped_rows": summary.skipped_rows,
        "rows_read": read.rows,
        "curated_rows": dict(sorted(read.left_out.items())),
        "recipe": summary.recipe,
    }
    for note in row_counts.RowLosses.of(metadata).notes():
        logger.warning("%s", note)
    for note in row_counts.own_token_notes(summary.splits):
        logger.info("%s", note)
    return metadata


@dataclass(frozen=True)
class DatasetJoin:
    """The parts and settings of a dataset that is joined from blocks.

    Args:
        encoder: encodes the rows that were held back.
    """

    context: StageContext
    config: Config
    store: BlockStore
    encoder: ExampleEncoder

    def join(self, encoded: EncodedBlocks) -> StageOutputs:
        """Return the dataset of all blocks.

        Raises:
            BadRows: all processes together found more bad rows than the pipeline allows.
            NoRows: no row of a split is left.
        """
        blocks = [self.store.read(number) for number in range(encoded.counts.num_blocks)]
        bad_rows = encoded.bad_rows_of(blocks)
        bad_rows.raise_if_any(encoded.counts.rows)
        files, counts = _files_of(blocks, DATASET), _summed(blocks)
        _check_rows(counts)
        for split, held_back in _files_of(blocks, HELD_BACK).items():
            files[split] = [self._encode_held_back(split, held_back, counts)]
        self.store.keep_only(file.name for of_split in files.values() for file in of_split)
        skipped = bad_rows.counts + encoded.counts.left_out
        summary = self._summary(files, counts, skipped)
        write_json(self.store.dataset / SUMMARY_FILE, summary.to_json())
        tell_learnt(summary)
        tell_missing_classes(self.encoder.labels)
        metadata = {
            **_row_metadata(summary, encoded.counts),
            **({"learnt": self._first_learnt(files)} if summary.id_columns else {}),
        }
        digests = {file.name: file.blake3 for of_split in files.values() for file in of_split}
        return StageOutputs({"dataset": Output("dataset", self.store.dataset, metadata, digests)})

    def _encode_held_back(
        self, split: str, files: list[BlockFile], counts: SplitCounts
    ) -> BlockFile:
        """Encode one example per source, with all its targets as references."""
        rows = ArrowSplit(self._paths(files))
        block_split, path = BlockSplit(0, split), self.store.new_file()
        batches = ((block_split, batch) for batch in self._reported(split, rows, counts))
        columns = columns_with(parts=parts_of(self.config.data) is not None)
        encoded = self.encoder.encode_grouped(batches)
        with SplitWriter(path, columns) as writer, closing(encoded):
            for _, examples in encoded:
                writer.write(examples.columns)
                counts.add(split, examples.counts)
        return self.store.finish(path, DATASET, block_split)

    def _reported(self, split: str, rows: ArrowSplit, counts: SplitCounts) -> Iterator[Batch]:
        for batch in grouped(rows):
            self.context.raise_if_stopped()
            self.context.report(phase=f"encoding {split}", step=counts.num_rows(split))
            yield batch

    def _summary(
        self,
        files: Mapping[str, list[BlockFile]],
        counts: SplitCounts,
        skipped_rows: Mapping[str, int],
    ) -> DatasetSummary:
        data, labels = self.config.data, self.encoder.labels
        paths = {split: self._paths(of_split) for split, of_split in files.items()}
        return DatasetSummary(
            recipe=self.config.recipe,
            source_prefix=data.source_prefix,
            source_suffix=data.source_suffix,
            files={s: [file.name for file in files[s]] for s in SPLITS if s in files},
            skipped_rows=dict(sorted(skipped_rows.items())),
            classes=class_names(labels),
            classes_are_ordered=are_ordered(labels),
            parts=parts_of(data),
            **self.encoder.summary(counts.by_split(), paths),
            **_trivial_targets(self.encoder.first_targets(paths["train"])),
        )

    def _first_learnt(self, files: Mapping[str, list[BlockFile]]) -> list[list[Any]]:
        """Return what is learnt of the first conversations, for people to look at."""
        rows = ArrowSplit(self._paths(files["train"]))
        tokenizer = load_tokenizer(str(self.store.dataset / TOKENIZER_FOLDER))
        return [learnt_pieces(row, tokenizer) for row in rows[:_NUM_SHOWN]]

    def _paths(self, files: Iterable[BlockFile]) -> list[Path]:
        return [self.store.path_of(file) for file in files]


def _check_rows(counts: SplitCounts) -> None:
    """Refuse splits all of whose rows were left out after they were read."""
    for split, counted in counts.by_split().items():
        if not counted["rows"]:
            dropped = counted.get("dropped_rows", 0)
            raise NoRows(
                f"split '{split}' has no usable row: {dropped} are longer than max_length, the "
                "others cannot be rendered."
            )


def _trivial_targets(targets: Sequence[Any]) -> dict[str, Any]:
    """Return what models that ignore their input would say, as fields of `DatasetSummary`."""
    if any(isinstance(target, float) for target in targets):
        are_numbers = all(isinstance(target, float | int) for target in targets)
        mean = math.fsum(targets) / len(targets) if are_numbers else math.nan
        return {"most_frequent_target": {}, "mean_target": mean if math.isfinite(mean) else None}
    if not targets or not all(isinstance(target, str | int) for target in targets):
        return {"most_frequent_target": {}}
    # Ties go to the smallest, not to the first: the order of rows is no property of a task.
    counts = Counter(targets).items()
    text, count = min(counts, key=lambda item: (-item[1], str(item[0])))
    return {"most_frequent_target": {"text": text, "count": count, "among": len(targets)}}


def damaged(context: StageContext, store: BlockStore, numbers: Iterable[int]) -> set[int]:
    """Return those blocks that are missing, or are not what was written."""
    found = set()
    for number in numbers:
        context.raise_if_stopped()
        context.report(phase="checking blocks", step=number)
        if not store.is_intact(number):
            found.add(number)
    return found


def _files_of(blocks: Iterable[EncodedBlock], folder: str) -> dict[str, list[BlockFile]]:
    found: dict[str, list[BlockFile]] = {}
    for block in blocks:
        for file in block.files:
            if file.folder == folder:
                found.setdefault(file.split, []).append(file)
    return found


def _summed(blocks: Iterable[EncodedBlock]) -> SplitCounts:
    counts = SplitCounts()
    for block in blocks:
        for split, counted in block.counts.items():
            counts.add(split, counted)
    return counts
