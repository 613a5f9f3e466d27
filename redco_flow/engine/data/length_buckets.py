"""Batch examples of like length together, so that little of a batch is padding.

Every example belongs to one of a few buckets, by its length alone; the batches of a bucket have
one shape, so there is one compilation per bucket. Each epoch shuffles within the buckets and the
batches among each other; without a seed the examples of a bucket keep their order, and the widest
batches come first: what does not fit into memory fails before any work is done. What does not fill
a bucket's last batch goes up into the next one, so an epoch has no more batches than without
buckets. Where a batch's rows stand is arithmetic on its number: no position is kept.
Dims in this file: N examples, D dims of a row (1 for one sequence, 2 for source and target).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from redco_flow.engine.errors import DataError

_NUM_ROUNDS = 8


def permuted(
    positions: NDArray[np.int64], count: int, seed: int, epoch: int, *, stream: str = ""
) -> NDArray[np.int64]:
    """Return what stands at some positions of a permutation of 0 … count - 1.

    A keyed Feistel network over the next even number of bits, walked until it falls inside the
    range: its time depends on `positions` only, there is no table of `count` entries, and it is the
    same on every NumPy version (whose own shuffles are only promised within one).

    Args:
        stream: tells the permutations of one seed and epoch apart.
    """
    # At least 3: over 16 values the network prefers some orders of 4 rows by several per cent.
    num_half_bits = max(3, (int(count - 1).bit_length() + 1) // 2)
    keys = _round_keys(seed, epoch, stream)
    found = _feistel(positions.astype(np.uint64), num_half_bits, keys)
    outside = np.flatnonzero(found >= count)
    while outside.size:
        found[outside] = _feistel(found[outside], num_half_bits, keys)
        outside = outside[found[outside] >= count]
    return found.astype(np.int64)


def _round_keys(seed: int, epoch: int, stream: str) -> NDArray[np.uint64]:
    name = f"redco-flow epoch order {seed} {epoch}{' ' if stream else ''}{stream}"
    digest = hashlib.sha512(name.encode()).digest()
    return np.frombuffer(digest, dtype="<u8")[:_NUM_ROUNDS].astype(np.uint64)


def _feistel(
    values: NDArray[np.uint64], num_half_bits: int, keys: NDArray[np.uint64]
) -> NDArray[np.uint64]:
    """Permute the numbers below 4**num_half_bits."""
    shift, mask = np.uint64(num_half_bits), np.uint64((1 << num_half_bits) - 1)
    left, right = values >> shift, values & mask
    for key in keys:
        left, right = right, left ^ (_mix(right + key) & mask)
    return (left << shift) | right


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Splitmix64's finaliser: every input bit changes every output bit with probability 1/2."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


Widths = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class LengthBuckets:
    """The assignment of examples to batches by length, and the width of each batch.

    Args:
        widths: of each bucket's rows, (D,); no bucket's is smaller than that of one before it.
        members: the examples of each bucket, ascending; every example is in one.
    """

    widths: tuple[Widths, ...]
    members: tuple[NDArray[np.int64], ...]

    @cached_property
    def num_examples(self) -> int:
        """N."""
        return sum(map(len, self.members))

    @cached_property
    def _digest(self) -> str:
        return hashlib.sha256(b"".join(part.tobytes() for part in self.members)).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """Return what tells these buckets from others."""
        return {"widths": [list(width) for width in self.widths], "digest": self._digest}

    def batches_per_bucket(self, batch_size: int) -> list[int]:
        """Return how many batches of an epoch have each bucket's shape."""
        return [count.num_batches for count in self._counts(batch_size)]

    def bucket_of_batch(self, index: int, batch_size: int, seed: int | None, epoch: int) -> int:
        """Return the bucket of an epoch's batch number `index`."""
        return self._position(index, batch_size, seed, epoch)[0]

    def rows(self, index: int, batch_size: int, seed: int | None, epoch: int) -> NDArray[np.int64]:
        """Return the examples of an epoch's batch number `index`: batch_size, or the rest."""
        bucket, number = self._position(index, batch_size, seed, epoch)
        counts = self._counts(batch_size)
        stop = min((number + 1) * batch_size, counts[bucket].num_rows)
        positions = np.arange(number * batch_size, stop, dtype=np.int64)
        return self._at(positions, bucket, counts, batch_size, (seed, epoch))

    def _counts(self, batch_size: int) -> list[_Count]:
        counts: list[_Count] = []
        from_below = 0
        for part in self.members:
            num_rows = len(part) + from_below
            is_last = len(counts) == len(self.members) - 1
            num_batches = -(-num_rows // batch_size) if is_last else num_rows // batch_size
            from_below = num_rows - num_batches * batch_size
            counts.append(_Count(num_rows, num_batches))
        return counts

    def _position(
        self, index: int, batch_size: int, seed: int | None, epoch: int
    ) -> tuple[int, int]:
        """Return a batch's bucket, and its number among that bucket's batches."""
        ends = np.cumsum(self.batches_per_bucket(batch_size))
        count = int(ends[-1])
        if seed is None:
            position = count - 1 - index
        else:
            position = int(permuted(np.array([index]), count, seed, epoch, stream="batches")[0])
        bucket = int(np.searchsorted(ends, position, side="right"))
        return bucket, int(position - (ends[bucket - 1] if bucket else 0))

    def _at(
        self,
        positions: NDArray[np.int64],
        bucket: int,
        counts: Sequence[_Count],
        batch_size: int,
        order: tuple[int | None, int],
    ) -> NDArray[np.int64]:
        """Return the examples at some positions of a bucket's order in (seed, epoch)."""
        own = self.members[bucket]
        numbers, (seed, epoch) = positions, order
        if seed is not None:
            num_rows = counts[bucket].num_rows
            numbers = permuted(positions, num_rows, seed, epoch, stream=f"bucket {bucket}")
        is_own = numbers < len(own)
        found = np.empty_like(numbers)
        found[is_own] = own[numbers[is_own]]
        if not is_own.all():
            # Those that came from below, where they stood after the last whole batch.
            below = numbers[~is_own] - len(own) + counts[bucket - 1].num_batches * batch_size
            found[~is_own] = self._at(below, bucket - 1, counts, batch_size, order)
        return found


@dataclass(frozen=True)
class _Count:
    """Number of examples of a bucket in an epoch, with those carried over from the bucket below."""

    num_rows: int
    num_batches: int


@dataclass(frozen=True)
class Bucketing:
    """Settings for reading examples in length buckets.

    Args:
        collate_fns: one per bucket: examples -> arrays of that bucket's widths.
    """

    buckets: LengthBuckets
    collate_fns: tuple[Callable[[list[Any]], Mapping[str, Any]], ...]


def choose_buckets(
    lengths: NDArray[np.integer[Any]], num_buckets: int, *, multiple: int = 8
) -> LengthBuckets:
    """Put examples into at most `num_buckets` buckets, with as little padding as that allows.

    Of several dims, the sum of their widths decides: the least padding where they grow together.

    Args:
        lengths: (N, D), what each example fills of a row.
        multiple: widths are rounded up to one of it.

    Raises:
        DataError: there are no examples.
    """
    if not len(lengths):
        raise DataError("there are no examples to put into buckets.")
    sizes = (-(-lengths // multiple) * multiple).sum(axis=1)
    levels, counts = np.unique(sizes, return_counts=True)
    ends = _cheapest_ends(levels, counts, num_buckets)
    bucket_of = np.searchsorted(levels[ends], sizes)
    members = tuple(np.flatnonzero(bucket_of == bucket) for bucket in range(len(ends)))
    longest = np.stack([lengths[part].max(axis=0) for part in members])
    # What goes up from a bucket must fit the next: short in all, but perhaps long in one dim.
    widths = np.maximum.accumulate(-(-longest // multiple) * multiple, axis=0)
    return LengthBuckets(tuple(tuple(map(int, width)) for width in widths), members)


def _cheapest_ends(
    levels: NDArray[np.integer[Any]], counts: NDArray[np.integer[Any]], num_buckets: int
) -> list[int]:
    """Return the last level of each bucket, by dynamic programming over the levels.

    A bucket costs its number of examples times its last level.
    """
    before = np.concatenate([[0], np.cumsum(counts)])
    cost = (levels * before[1:]).astype(np.float64)
    starts: list[NDArray[np.integer[Any]]] = []
    for _ in range(min(num_buckets, len(levels)) - 1):
        # Entry (i, j): levels below i as cheaply as so far, and one bucket of levels i … j.
        last = levels[None, :] * (before[None, 1:] - before[:-1, None])
        with_one_more = np.where(
            np.tri(len(levels), dtype=bool).T, np.concatenate([[0.0], cost[:-1]])[:, None] + last,
            np.inf,
        )  # fmt: skip
        starts.append(with_one_more.argmin(axis=0))
        cost = with_one_more.min(axis=0)
    ends = [len(levels) - 1]
    for start in reversed(starts):
        first = int(start[ends[-1]])
        if first == 0:
            break
        ends.append(first - 1)
    return ends[::-1]
