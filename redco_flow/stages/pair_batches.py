"""Read a pipeline's raw data as checked pairs in batches, saying how far it is.

Ends with an error where the data cannot be used: bad rows, changed files, splits without rows.
Refuses to know what becomes of the pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from redco_flow.spec.pipeline import DataSection
from redco_flow.stages.bad_rows import BadRowLog, NoRows
from redco_flow.stages.context import StageContext
from redco_flow.stages.data_integrity import DataGuard
from redco_flow.stages.data_source import SPLITS, open_sources
from redco_flow.stages.preprocess import Config, data_files
from redco_flow.stages.text_pairs import (
    BlockSplit,
    PairBatch,
    RowCounts,
    batches_by_place,
    read_pairs,
)

_ROWS_BETWEEN_REPORTS = 1000


def read_pair_batches(
    context: StageContext,
    config: Config,
    bad_rows: BadRowLog,
    counts: RowCounts,
    phase: str,
    is_wanted: Callable[[int], bool],
) -> Iterator[tuple[BlockSplit, PairBatch]]:
    """Yield the usable pairs of the wanted blocks batch by batch, in reading order.

    Where bad rows are an error, nothing is yielded after the first one, but all are read, so
    that the error has them all.

    Args:
        bad_rows: gets the rows that cannot be used, of all blocks.
        counts: gets the numbers of all blocks.
        phase: what the stage is said to be doing meanwhile.
        is_wanted: takes a block's number.

    Raises:
        BadRows, NoRows, DataChanged: the data cannot be used; after the last batch.
    """
    guard = DataGuard(context, data_files(config))

    def on_row() -> None:
        if counts.rows % _ROWS_BETWEEN_REPORTS == 0:
            context.raise_if_stopped()
            context.report(phase=phase, step=counts.rows)

    sources = open_sources(config.data)
    pairs = read_pairs(sources, config.data, bad_rows, counts, on_row, is_wanted)
    for place, batch in batches_by_place(pairs):
        if config.data.on_bad_row == "skip" or not bad_rows.counts:
            yield place, batch
    guard.check_again()
    bad_rows.raise_if_any()
    for split in SPLITS:
        if not counts.usable[split] and (split == "train" or getattr(config.data, split)):
            raise NoRows(_no_rows_message(config.data, split, bad_rows))


def _no_rows_message(data: DataSection, split: str, bad_rows: BadRowLog) -> str:
    where = getattr(data, split) or data.dataset
    skipped = f" ({bad_rows.counts.total()} bad rows were skipped)" if bad_rows.counts else ""
    return f"{where}: no usable row for split '{split}'{skipped}; is the file empty?"
