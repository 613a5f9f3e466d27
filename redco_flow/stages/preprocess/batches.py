"""Read a pipeline's raw data as checked pairs, or rows, in batches, saying how far it is.

Ends with an error where the data cannot be used: bad rows, changed files, splits without rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from redco_flow.runtime.context import StageContext
from redco_flow.spec.pipeline import DataSection
from redco_flow.stages.artifacts.arrow_split import read_batches
from redco_flow.stages.artifacts.curation import dropped_rows
from redco_flow.stages.data.guard import DataGuard
from redco_flow.stages.data.rows import BadRowLog, NoRows
from redco_flow.stages.data.source import open_sources
from redco_flow.stages.data.splits import SPLITS
from redco_flow.stages.preprocess.config import Config, data_files, named_files
from redco_flow.stages.preprocess.pairs import (
    RAW_COLUMNS,
    BlockSplit,
    PairBatch,
    ReadRow,
    RowCounts,
    batches_by_block,
    read_pairs,
)

_ROWS_BETWEEN_REPORTS = 1000


class RawRows:
    """The pipeline's raw data, read once as pairs, or as rows that are kept as they are.

    Args:
        read_row: checks a row and makes of it what is kept.

    Attributes:
        bad_rows: the rows that cannot be used, of all blocks.
        counts: the numbers of all blocks.
        digests: of the files, from the first batch on.
    """

    def __init__(self, context: StageContext, config: Config, read_row: ReadRow) -> None:
        self._context, self._config, self._read_row = context, config, read_row
        self.bad_rows, self.counts = BadRowLog(config.data.on_bad_row), RowCounts()
        self.digests: Mapping[Path, str] = {}

    def batches(
        self, phase: str, is_wanted: Callable[[int], bool]
    ) -> Iterator[tuple[BlockSplit, PairBatch]]:
        """Yield the usable pairs of the wanted blocks batch by batch, in reading order.

        Where bad rows are an error, nothing is yielded after the first one, but all are read, so
        that the error has them all.

        Args:
            phase: what the stage is said to be doing meanwhile.
            is_wanted: takes a block's number.

        Raises:
            WrongCuration: rows are to be left out of other data.
            BadRows, NoRows, DataChanged: the data cannot be used; after the last batch.
        """
        data, bad_rows, counts = self._config.data, self.bad_rows, self.counts
        config = self._config
        guard = DataGuard(self._context, data_files(config), lambda: named_files(config))
        self.digests = guard.digests
        left_out = dropped_rows(self._context, data, guard.digests)

        def on_row() -> None:
            if counts.rows % _ROWS_BETWEEN_REPORTS == 0:
                self._context.raise_if_stopped()
                self._context.report(phase=phase, step=counts.rows)

        sources = open_sources(data)
        pairs = read_pairs(
            sources, data, self._read_row, bad_rows, counts, on_row, is_wanted, left_out
        )
        for block_split, batch in batches_by_block(pairs):
            if data.on_bad_row != "error" or not bad_rows.counts:
                yield block_split, batch
        guard.check_again()
        bad_rows.raise_if_any(counts.rows)
        for split in SPLITS:
            if not counts.usable[split] and (split == "train" or getattr(data, split)):
                raise NoRows(_no_rows_message(data, split, bad_rows))


class KeptPairs:
    """All pairs of one reading, kept in a file: what is expensive to read is read once.

    Args:
        raw: is read by `keep`.
        path: of the file; the caller's to remove.
    """

    def __init__(self, context: StageContext, raw: RawRows, path: Path) -> None:
        self._context, self._raw, self._path = context, raw, path
        self._block_splits: list[BlockSplit] = []
        self.bad_rows, self.counts = raw.bad_rows, raw.counts

    @property
    def is_there(self) -> bool:
        """Whether the pairs were kept."""
        return bool(self._block_splits)

    def keep(self, phase: str) -> Iterator[tuple[BlockSplit, PairBatch]]:
        """Yield every batch of the raw data, and keep it.

        Raises:
            BadRows, NoRows, DataChanged: as `RawRows.batches`.
        """
        import pyarrow as pa

        schema = pa.schema([(name, pa.string()) for name in RAW_COLUMNS])
        with pa.OSFile(str(self._path), "wb") as sink, pa.ipc.new_stream(sink, schema) as stream:
            for block_split, batch in self._raw.batches(phase, is_wanted=lambda _: True):
                stream.write_batch(pa.RecordBatch.from_pydict(batch, schema=schema))
                self._block_splits.append(block_split)
                yield block_split, batch

    def batches(
        self, phase: str, is_wanted: Callable[[int], bool]
    ) -> Iterator[tuple[BlockSplit, PairBatch]]:
        """Yield what was kept of the wanted blocks; see `RawRows.batches`."""
        num_rows = 0
        kept = read_batches(self._path, list(RAW_COLUMNS))
        for block_split, batch in zip(self._block_splits, kept, strict=True):
            self._context.raise_if_stopped()
            self._context.report(phase=phase, step=num_rows)
            num_rows += len(batch["row_id"])
            if is_wanted(block_split.block):
                yield block_split, batch


def _no_rows_message(data: DataSection, split: str, bad_rows: BadRowLog) -> str:
    where = getattr(data, split) or data.dataset or "data.mixture"
    skipped = f" ({bad_rows.counts.total()} bad rows were skipped)" if bad_rows.counts else ""
    return f"{where}: no usable row for split '{split}'{skipped}; is the file empty?"
