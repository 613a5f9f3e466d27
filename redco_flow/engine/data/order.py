"""Compute the rows of each batch: pure arithmetic on (seed, global batch size, step).

Nothing here reads an example or keeps a position: batch `step` is computed from its number alone,
so a resumed run, a run on other devices and an uninterrupted run read the same rows. Knows no
processes beyond a slice of the global batch, and no collating. The layout cuts a global batch into
micro-batches over data shards and processes; the batch never changes with the devices.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Generic, Protocol, TypeVar

import jax
import numpy as np
from numpy.typing import NDArray

from redco_flow.engine.data.length_buckets import LengthBuckets, permuted
from redco_flow.engine.errors import DataError
from redco_flow.engine.sharding.mesh import DataProcess

_POSITION_VERSION = 1
_MIXTURE_BLOCK = 4096


def epoch_order(num_examples: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return the order in which an epoch visits the rows: a permutation of their indices."""
    return permuted(np.arange(num_examples, dtype=np.int64), num_examples, seed, epoch)


class RowOrder(Protocol):
    """An endless order of rows, of which a position's number says all."""

    @property
    def epoch_length(self) -> int:
        """Positions that count as an epoch."""

    def rows(self, positions: NDArray[np.int64], seed: int) -> NDArray[np.int64]:
        """Return the rows that stand at some positions."""

    def to_json(self) -> dict[str, Any]:
        """Return what tells this order from others."""


def _endlessly(
    positions: NDArray[np.int64], count: int, seed: int, stream: str
) -> NDArray[np.int64]:
    """Return what stands at some positions of permutations of 0 … count - 1 without an end."""
    found = np.empty_like(positions)
    for number in np.unique(positions // count):
        is_in = positions // count == number
        found[is_in] = permuted(positions[is_in] % count, count, seed, int(number), stream=stream)
    return found


@dataclass(frozen=True)
class Part:
    """Rows that stand side by side, and how many of the drawn ones are from there.

    Args:
        start, num_rows: which rows.
        epoch_length: how many of them count as an epoch: all, or fewer where rows overlap.
        weight: share of the draws, relative to the other parts'.
    """

    name: str
    start: int
    num_rows: int
    epoch_length: int
    weight: float


@dataclass(frozen=True)
class Mixture:
    """Draws rows of several parts by weight, each part's in an order of its own.

    Every 4096 positions hold as many rows of a part as its weight says, in a random order. A part
    whose rows are used up begins again, in another order. With one part this is the order of
    draws without an end: each row once, then each once again.

    Raises:
        DataError: no parts, one without rows, or a weight so small that nothing would be drawn.
    """

    parts: Sequence[Part]

    def __post_init__(self) -> None:
        if not self.parts:
            raise DataError("a mixture has no parts.")
        for part in self.parts:
            if part.num_rows < 1:
                raise DataError(f"the mixture's part '{part.name}' has no rows.")
        for part, count in zip(self.parts, self._counts.tolist(), strict=True):
            if count < 1:
                share = part.weight / sum(one.weight for one in self.parts)
                raise DataError(
                    f"the mixture's part '{part.name}' has {share:.2g} of the weight, and at least "
                    f"1/{_MIXTURE_BLOCK} is drawn from a part: leave it out, or give it more."
                )

    @property
    def epoch_length(self) -> int:
        """As many rows as count as an epoch of all parts."""
        return sum(part.epoch_length for part in self.parts)

    @cached_property
    def _counts(self) -> NDArray[np.int64]:
        """Divide the positions of a block among parts by weight, largest remainders first."""
        weights = np.array([part.weight for part in self.parts], np.float64)
        exact = weights / weights.sum() * _MIXTURE_BLOCK
        counts: NDArray[np.int64] = exact.astype(np.int64)
        by_remainder = np.argsort(counts - exact, kind="stable")
        counts[by_remainder[: _MIXTURE_BLOCK - counts.sum()]] += 1
        return counts

    def rows(self, positions: NDArray[np.int64], seed: int) -> NDArray[np.int64]:
        """Return the rows that stand at some positions."""
        blocks = positions // _MIXTURE_BLOCK
        ranks = _endlessly(positions, _MIXTURE_BLOCK, seed, "mixture")
        ends = np.cumsum(self._counts)
        which = np.searchsorted(ends, ranks, side="right")
        counts, starts = self._counts[which], (ends - self._counts)[which]
        # How many rows of the same part stand before it, in all blocks before and in its own.
        draws = blocks * counts + ranks - starts
        found = np.empty_like(positions)
        for number, part in enumerate(self.parts):
            is_in = which == number
            drawn = _endlessly(draws[is_in], part.num_rows, seed, f"part {part.name}")
            found[is_in] = part.start + drawn
        return found

    def to_json(self) -> dict[str, Any]:
        """Return what tells this mixture from others."""
        return {"parts": [asdict(part) for part in self.parts]}


@dataclass(frozen=True)
class BatchSampler:
    """The rows of every batch of a training or an evaluation.

    Args:
        num_examples: rows in the data; at least 1.
        global_batch_size: rows of one optimizer step over all devices and processes.
        seed: decides the order of each epoch; None keeps the rows in their own order.
        buckets: batch rows of like length together.
        order: in which rows are drawn, instead of each once per epoch; with a seed.

    Raises:
        DataError: no examples, a batch size below 1, buckets of other data, or buckets as well as
            an order.
    """

    num_examples: int
    global_batch_size: int
    seed: int | None
    buckets: LengthBuckets | None = None
    order: RowOrder | None = None

    def __post_init__(self) -> None:
        if self.num_examples < 1:
            raise DataError("there are no examples to read: num_examples is 0, at least 1 needed.")
        if self.global_batch_size < 1:
            raise DataError(f"global_batch_size is {self.global_batch_size}, at least 1 needed.")
        if self.buckets is not None and self.buckets.num_examples != self.num_examples:
            raise DataError(
                f"the buckets hold {self.buckets.num_examples} examples, the data "
                f"{self.num_examples}."
            )
        if self.order is not None and (self.buckets is not None or self.seed is None):
            raise DataError("rows are drawn in an order with a seed, and not in buckets.")

    @property
    def steps_per_epoch(self) -> int:
        """Batches per epoch, the last one perhaps partial, or going on into the next epoch."""
        length = self.num_examples if self.order is None else self.order.epoch_length
        return -(-length // self.global_batch_size)

    def epoch(self, step: int) -> int:
        """Return the epoch, from 0, that a step (from 0) belongs to."""
        return step // self.steps_per_epoch

    def rows(self, step: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Return a step's row indices and mask, both [global_batch_size].

        A partial last batch repeats its first row with mask 0, so every row of the data has mask 1
        exactly once per epoch.
        """
        rows = self._real_rows(step)
        num_missing = self.global_batch_size - len(rows)
        mask = np.ones(self.global_batch_size, np.float32)
        mask[len(rows) :] = 0
        return np.concatenate([rows, np.repeat(rows[:1], num_missing)]), mask

    def bucket(self, step: int) -> int | None:
        """Return which bucket a step's rows are of; None without buckets."""
        if self.buckets is None:
            return None
        epoch, index = divmod(step, self.steps_per_epoch)
        return self.buckets.bucket_of_batch(index, self.global_batch_size, self.seed, epoch)

    def _real_rows(self, step: int) -> NDArray[np.int64]:
        """Return a step's rows without those that only fill up."""
        if self.order is not None:
            assert self.seed is not None  # an order has one
            first = step * self.global_batch_size
            positions = np.arange(first, first + self.global_batch_size, dtype=np.int64)
            return self.order.rows(positions, self.seed)
        epoch, index = divmod(step, self.steps_per_epoch)
        if self.buckets is not None:
            return self.buckets.rows(index, self.global_batch_size, self.seed, epoch)
        start = index * self.global_batch_size
        stop = min(start + self.global_batch_size, self.num_examples)
        positions = np.arange(start, stop, dtype=np.int64)
        if self.seed is None:
            return positions
        return permuted(positions, self.num_examples, self.seed, epoch)

    def position(self, step: int) -> dict[str, Any]:
        """Return the JSON cursor of "`step` batches were consumed", to be kept in a checkpoint."""
        position: dict[str, Any] = {
            "version": _POSITION_VERSION,
            "step": step,
            "num_examples": self.num_examples,
            "global_batch_size": self.global_batch_size,
            "seed": self.seed,
        }
        if self.buckets is not None:
            position["buckets"] = self.buckets.to_json()
        if self.order is not None:
            position["order"] = self.order.to_json()
        return position

    def differences(self, position: Mapping[str, Any]) -> list[str]:
        """Return how a cursor differs from `position` at its step, one message per key."""
        wanted = self.position(position["step"])
        return [
            f"{key}: checkpoint {position.get(key)!r}, now {value!r}"
            for key, value in {**dict.fromkeys(position), **wanted}.items()
            if position.get(key) != value
        ]

    def step_at(self, position: Mapping[str, Any]) -> int:
        """Return the next step of a cursor that `position` made.

        Raises:
            DataError: the cursor belongs to other data, batch size or seed; the order of the rows
                would silently differ. The message names every differing key.
        """
        step = position.get("step")
        if not isinstance(step, int) or step < 0:
            raise DataError(f"the data position has step {step!r}; a whole number is needed.")
        if differing := self.differences(position):
            raise DataError(
                f"the checkpoint's data position does not fit this training ({'; '.join(differing)}"
                "). Resume with the same data, global_batch_size and seed, or start afresh."
            )
        return step


@dataclass(frozen=True)
class BatchLayout:
    """The division of a global batch into shards and micro-batches; build it with `plan_batch`."""

    global_batch_size: int
    num_micro: int
    process: DataProcess

    @property
    def micro_batch_size(self) -> int:
        """Rows of one micro-batch over all data shards."""
        return self.global_batch_size // self.num_micro

    @property
    def rows(self) -> np.ndarray:
        """The rows of the global batch that this process holds, in order, int32."""
        count = self.global_batch_size // self.process.count
        return np.arange(count, dtype=np.int32) + np.int32(self.process.index * count)

    def split(self, batch: Any) -> Any:
        """View this process' rows (B, ...) of a tree of NumPy arrays as (M, B / M, ...)."""
        return jax.tree.map(lambda x: np.reshape(x, (self.num_micro, -1, *np.shape(x)[1:])), batch)


def plan_batch(
    global_batch_size: int,
    per_device_batch_size: int | None,
    num_data_shards: int,
    process: DataProcess,
) -> BatchLayout:
    """Decide how many micro-batches a global batch takes.

    Args:
        per_device_batch_size: rows that one data shard works on at once; None: all of its rows.

    Raises:
        ValueError: a size is not positive, or the global batch is not a multiple of the rows
            worked on at once; the message lists the nearest that are.
    """
    check_positive("global_batch_size", global_batch_size)
    if per_device_batch_size is not None:
        check_positive("per_device_batch_size", per_device_batch_size)
    unit = num_data_shards * (per_device_batch_size or 1)
    check_multiple(
        "global_batch_size",
        global_batch_size,
        unit,
        f"{num_data_shards} data shards x {per_device_batch_size or 1} rows per device",
    )
    num_micro = global_batch_size // unit if per_device_batch_size else 1
    return BatchLayout(global_batch_size, num_micro, process)


def check_positive(name: str, value: int) -> None:
    """Raise ValueError unless `value` is a positive whole number."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}={value!r} must be a positive whole number.")


def check_multiple(name: str, value: int, unit: int, origin: str) -> None:
    """Raise ValueError, with the nearest valid values, unless `unit` divides `value`."""
    if value % unit:
        below = value - value % unit
        nearest = ", ".join(str(v) for v in (below, below + unit) if v)
        raise ValueError(
            f"{name}={value} is not a multiple of {unit} ({origin}); "
            f"nearest valid values: {nearest}."
        )


T = TypeVar("T")
U = TypeVar("U")

DEPTH = 2


def put_early(items: Iterable[T], put: Callable[[T], U]) -> Iterator[U]:
    """Prefetch to devices: yield `put(item)` in order, with DEPTH further ones already put."""
    ahead: deque[U] = deque()
    for item in items:
        ahead.append(put(item))
        if len(ahead) > DEPTH:
            yield ahead.popleft()
    yield from ahead


class LateFetch(Generic[T]):
    """Fetches device results DEPTH pushes after they were dispatched.

    Waiting for an old result also keeps the host from running ahead without bound.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[T, Any]] = deque()

    def push(self, tag: T, result: Any) -> Iterator[tuple[T, Any]]:
        """Add a dispatched result; yield the (tag, host result) pairs that are due."""
        self._waiting.append((tag, result))
        while len(self._waiting) > DEPTH:
            yield self._fetch()

    def drain(self) -> Iterator[tuple[T, Any]]:
        """Wait for and yield all that is left."""
        while self._waiting:
            yield self._fetch()

    def _fetch(self) -> tuple[T, Any]:
        tag, result = self._waiting.popleft()
        return tag, jax.device_get(result)


def fetch_late(results: Iterable[tuple[T, Any]]) -> Iterator[tuple[T, Any]]:
    """Yield (tag, host result) for (tag, device result), DEPTH behind their dispatch."""
    late: LateFetch[T] = LateFetch()
    for tag, result in results:
        yield from late.push(tag, result)
    yield from late.drain()
