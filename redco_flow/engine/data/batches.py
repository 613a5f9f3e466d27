"""Batches from examples: read, collated and prefetched by a thread of their own.

`TrainBatches` and `EvalBatches` turn the row numbers of a `BatchSampler` into arrays. grain runs
the reading ahead; an error in it reaches the consumer with the rows it happened on. Knows nothing
of devices: a batch is NumPy, and a process gets its contiguous slice of each global batch.
Dims in this file: B rows of this process's slice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self, runtime_checkable

import grain
import numpy as np
from numpy.typing import NDArray

from redco_flow.engine.data.length_buckets import Bucketing
from redco_flow.engine.data.order import BatchSampler, RowOrder, epoch_order
from redco_flow.engine.errors import DataError

__all__ = [
    "Batch",
    "BatchIterator",
    "BatchSampler",
    "CollateFn",
    "EvalBatches",
    "Examples",
    "TrainBatches",
    "epoch_order",
    "read_rows",
]

CollateFn = Callable[[list[Any]], Mapping[str, Any]]

_NUM_ROWS_IN_MESSAGE = 20


class Examples(Protocol):
    """Anything with a length and rows by index: a list, a `datasets.Dataset`, one of your own.

    With `__getitems__(indices) -> list` as well (as `datasets.Dataset` has), a batch is one read.
    """

    def __len__(self) -> int: ...
    def __getitem__(self, index: Any, /) -> Any: ...


@runtime_checkable
class _ReadsManyRows(Protocol):
    def __getitems__(self, keys: list[int]) -> list[Any]: ...


@dataclass(frozen=True)
class Batch:
    """One process's slice of one global batch.

    Args:
        step: its number from 0, over all epochs.
        epoch: from 0.
        arrays: what collate_fn made of the rows; leading dim B.
        mask: [B] float32; 0 where a row only fills up the last batch of an epoch.
        rows: [B] int64; the rows' indices in the examples.
    """

    step: int
    epoch: int
    arrays: dict[str, Any]
    mask: NDArray[np.float32]
    rows: NDArray[np.int64]


def read_rows(examples: Examples, rows: NDArray[np.int64]) -> list[Any]:
    """Return the examples at some indices, each distinct one read once, Arrow in a single call."""
    distinct, positions = np.unique(rows, return_inverse=True)
    indices = [int(row) for row in distinct]
    if isinstance(examples, _ReadsManyRows):
        found = list(examples.__getitems__(indices))
    else:
        found = [examples[index] for index in indices]
    return [found[position] for position in positions]


class BatchIterator(Iterator[Batch]):
    """Batches in order, prepared ahead by a thread that ends when this is closed or fails.

    Usable in a `with` statement; closing twice is fine.
    """

    _closed = True

    def __init__(self, steps: range, make: Callable[[int], Batch], num_ahead: int) -> None:
        options = grain.ReadOptions(
            num_threads=1 if num_ahead else 0, prefetch_buffer_size=num_ahead
        )
        self._batches = iter(grain.MapDataset.source(steps).map(make).to_iter_dataset(options))
        self._closed = False

    def __next__(self) -> Batch:
        if self._closed:
            raise StopIteration
        try:
            batch: Batch = next(self._batches)
        except BaseException:
            self.close()
            raise
        return batch

    def close(self) -> None:
        """End the reading thread; batches that were prepared ahead are dropped."""
        if not self._closed:
            self._closed = True
            self._batches.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


class TrainBatches:
    """Training batches from any step on, every example once per epoch, in an order of its own.

    Args:
        examples: the rows; see `Examples`.
        collate_fn: a list of B examples → named arrays with leading dim B.
        global_batch_size: rows per optimizer step over all processes.
        seed: of the order.
        bucketing: batch examples of like length together, by its functions instead of collate_fn.
        order: in which examples are drawn, instead of each once per epoch; not with bucketing.
        start_step: the first batch's number; a seek costs nothing.
        stop_step: the number after the last batch; None goes on for ever.
        process_index: which of `num_processes` equal slices of each batch to read.
        num_processes: must divide global_batch_size.
        num_ahead: batches prepared ahead by a thread; 0 prepares each when it is asked for.

    Raises:
        DataError: sizes that do not fit; while iterating, rows that cannot be read or collated.
    """

    def __init__(
        self,
        examples: Examples,
        collate_fn: CollateFn,
        *,
        global_batch_size: int,
        seed: int,
        bucketing: Bucketing | None = None,
        order: RowOrder | None = None,
        start_step: int = 0,
        stop_step: int | None = None,
        process_index: int = 0,
        num_processes: int = 1,
        num_ahead: int = 2,
    ) -> None:
        buckets = bucketing.buckets if bucketing else None
        self.sampler = BatchSampler(len(examples), global_batch_size, seed, buckets, order)
        if start_step < 0:
            raise DataError(f"start_step is {start_step}; it counts from 0.")
        # grain wants a length; this one's end is never reached.
        self._steps = range(start_step, 2**62 if stop_step is None else max(start_step, stop_step))
        self._source = _BatchSource(
            self.sampler,
            examples,
            bucketing.collate_fns if bucketing else (collate_fn,),
            _slice_of(global_batch_size, process_index, num_processes),
        )
        self._num_ahead = num_ahead

    def __iter__(self) -> BatchIterator:
        return BatchIterator(self._steps, self._source.batch, self._num_ahead)


class EvalBatches:
    """Batches over all examples once, in their own order, a partial one filled up with mask 0.

    With `bucketing` the order is by bucket, the widest first.

    Args: as `TrainBatches`; `batch_size` is the global one.
    """

    def __init__(
        self,
        examples: Examples,
        collate_fn: CollateFn,
        *,
        batch_size: int,
        bucketing: Bucketing | None = None,
        process_index: int = 0,
        num_processes: int = 1,
        num_ahead: int = 2,
    ) -> None:
        buckets = bucketing.buckets if bucketing else None
        self.sampler = BatchSampler(len(examples), batch_size, None, buckets)
        self._source = _BatchSource(
            self.sampler,
            examples,
            bucketing.collate_fns if bucketing else (collate_fn,),
            _slice_of(batch_size, process_index, num_processes),
        )
        self._num_ahead = num_ahead

    def __len__(self) -> int:
        return self.sampler.steps_per_epoch

    def __iter__(self) -> BatchIterator:
        return BatchIterator(range(len(self)), self._source.batch, self._num_ahead)


# No repr: grain prints its sources, and this one holds all the data.
@dataclass(frozen=True, repr=False)
class _BatchSource:
    """Makes the batch of a step; stateless, so that steps can be asked for in any order.

    Args:
        collate_fns: one per bucket of the sampler; one where it has none.
    """

    sampler: BatchSampler
    examples: Examples
    collate_fns: tuple[CollateFn, ...]
    part: slice

    def batch(self, step: int) -> Batch:
        rows, mask = self.sampler.rows(step)
        rows, mask = rows[self.part], mask[self.part]
        collate_fn = self.collate_fns[self.sampler.bucket(step) or 0]
        arrays = _collate(collate_fn, _read(self.examples, rows, step), rows, step)
        return Batch(step, self.sampler.epoch(step), arrays, mask, rows)


def _slice_of(global_batch_size: int, process_index: int, num_processes: int) -> slice:
    if num_processes < 1 or not 0 <= process_index < num_processes:
        raise DataError(
            f"process_index {process_index} of num_processes {num_processes}: it must be one of "
            "0 … num_processes - 1."
        )
    size, rest = divmod(global_batch_size, num_processes)
    if rest:
        raise DataError(
            f"global_batch_size {global_batch_size} cannot be split over {num_processes} "
            f"processes; the nearest sizes are {size * num_processes or num_processes} and "
            f"{(size + 1) * num_processes}."
        )
    return slice(process_index * size, (process_index + 1) * size)


def _read(examples: Examples, rows: NDArray[np.int64], step: int) -> list[Any]:
    try:
        return read_rows(examples, rows)
    except Exception as error:
        raise DataError(
            f"step {step}: reading rows {_listed(rows)} failed: {_told(error)}"
        ) from error


def _collate(
    collate_fn: CollateFn, examples: list[Any], rows: NDArray[np.int64], step: int
) -> dict[str, Any]:
    try:
        arrays = dict(collate_fn(examples))
    except Exception as error:
        culprits = _failing_alone(collate_fn, examples, rows)
        which = f" (each alone fails too: {_listed(culprits)})" if culprits else ""
        raise DataError(
            f"step {step}: collate_fn failed on rows {_listed(rows)}{which}: {_told(error)}"
        ) from error
    for name, array in arrays.items():
        shape = np.shape(array)
        if not shape or shape[0] != len(rows):
            raise DataError(
                f"step {step}: collate_fn gave {name!r} of shape {shape} for {len(rows)} examples; "
                f"its leading dim must be {len(rows)}. Rows {_listed(rows)}."
            )
    return arrays


def _failing_alone(
    collate_fn: CollateFn, examples: list[Any], rows: NDArray[np.int64]
) -> list[int]:
    culprits = []
    for row, example in dict(zip(rows.tolist(), examples, strict=True)).items():
        try:
            collate_fn([example])
        except Exception:  # noqa: BLE001 - the first error is raised; this only names its rows
            culprits.append(row)
    return culprits


def _listed(rows: Sequence[int] | NDArray[np.int64]) -> str:
    distinct = list(dict.fromkeys(int(row) for row in rows))
    shown = ", ".join(map(str, distinct[:_NUM_ROWS_IN_MESSAGE]))
    rest = len(distinct) - _NUM_ROWS_IN_MESSAGE
    return f"[{shown}, … {rest} more]" if rest > 0 else f"[{shown}]"


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
