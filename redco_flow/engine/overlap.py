"""Keep the devices busy: prefetch batches to the devices, fetch results late.

A step is dispatched while the one before it still computes. Knows nothing about what travels.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

import jax

T = TypeVar("T")
U = TypeVar("U")

DEPTH = 2


def put_early(items: Iterable[T], put: Callable[[T], U], depth: int = DEPTH) -> Iterator[U]:
    """Yield `put(item)` in order, with `depth` further ones already put."""
    ahead: deque[U] = deque()
    for item in items:
        ahead.append(put(item))
        if len(ahead) > depth:
            yield ahead.popleft()
    yield from ahead


class LateFetch(Generic[T]):
    """Fetches device results `depth` pushes after they were dispatched.

    Waiting for an old result also keeps the host from running ahead without bound.
    """

    def __init__(self, depth: int = DEPTH) -> None:
        self._depth = depth
        self._waiting: deque[tuple[T, Any]] = deque()

    def push(self, tag: T, result: Any) -> Iterator[tuple[T, Any]]:
        """Add a dispatched result; yield the (tag, host result) pairs that are due."""
        self._waiting.append((tag, result))
        while len(self._waiting) > self._depth:
            yield self._fetch()

    def drain(self) -> Iterator[tuple[T, Any]]:
        """Wait for and yield all that is left."""
        while self._waiting:
            yield self._fetch()

    def _fetch(self) -> tuple[T, Any]:
        tag, result = self._waiting.popleft()
        return tag, jax.device_get(result)


def fetch_late(results: Iterable[tuple[T, Any]], depth: int = DEPTH) -> Iterator[tuple[T, Any]]:
    """Yield (tag, host result) for (tag, device result), `depth` behind their dispatch."""
    late: LateFetch[T] = LateFetch(depth)
    for tag, result in results:
        yield from late.push(tag, result)
    yield from late.drain()
