"""Cut a global batch into micro-batches over data shards and processes.

The global batch is the user's and never changes with the devices; this decides only how it is
worked off.
Dims in this file: M micro-batches, B rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import jax
import numpy as np

from redco_flow.engine.sharding.mesh import DataProcess


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
