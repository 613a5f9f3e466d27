"""Read a pipeline's raw data as checked pairs in batches, saying how far it is.

Ends with an error where the data cannot be used: bad rows, changed files, splits without rows.
Refuses to know what becomes of the pairs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from redco_flow.spec.pipeline import DataSection
from redco_flow.stages.bad_rows import BadRowLog, NoRows
from redco_flow.stages.context import StageContext
from redco_flow.stages.data_integrity import DataGuard
from redco_flow.stages.data_source import SPLITS, open_sources
from redco_flow.stages.preprocess import Config, data_files
from redco_flow.stages.text_pairs import PairBatch, batches_by_split, read_pairs

_ROWS_BETWEEN_REPORTS = 1000


def read_pair_batches(
    context: StageContext, config: Config, bad_rows: BadRowLog, phase: str
) -> Iterator[tuple[str, PairBatch]]:
    """Yield each split's usable pairs batch by batch, in reading order.

    Where bad rows are an error, nothing is yielded after the first one, but all are read, so
    that the error has them all.

    Args:
        bad_rows: gets the rows that cannot be used.
        phase: what the stage is said to be doing meanwhile.

    Raises:
        BadRows, NoRows, DataChanged: the data cannot be used; after the last batch.
    """
    guard = DataGuard(context, data_files(config))
    num_read = 0
    num_usable: Counter[str] = Counter()

    def on_row() -> None:
        nonlocal num_read
        num_read += 1
        if num_read % _ROWS_BETWEEN_REPORTS == 1:
            context.raise_if_stopped()
            context.report(phase=phase, step=num_read)

    pairs = read_pairs(open_sources(config.data), config.data, bad_rows, on_row)
    for split, batch in batches_by_split(pairs):
        num_usable[split] += len(batch["row_id"])
        if config.data.on_bad_row == "skip" or not bad_rows.counts:
            yield split, batch
    guard.check_again()
    bad_rows.raise_if_any()
    for split in SPLITS:
        if not num_usable[split] and (split == "train" or getattr(config.data, split)):
            raise NoRows(_no_rows_message(config.data, split, bad_rows))


def _no_rows_message(data: DataSection, split: str, bad_rows: BadRowLog) -> str:
    where = getattr(data, split) or data.dataset
    skipped = f" ({bad_rows.counts.total()} bad rows were skipped)" if bad_rows.counts else ""
    return f"{where}: no usable row for split '{split}'{skipped}; is the file empty?"
