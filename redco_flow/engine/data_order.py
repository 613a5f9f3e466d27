"""Which rows make up which batch: pure arithmetic on (seed, global batch size, step).

Nothing here reads an example or keeps a position: batch `step` is computed from its number alone,
so a resumed run, a run on other devices and an uninterrupted run read the same rows. Knows no
processes beyond a slice of the global batch, and no collating.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from redco_flow.engine.errors import DataError

_NUM_ROUNDS = 8
_POSITION_VERSION = 1


def epoch_order(num_examples: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return the order in which an epoch visits the rows: a permutation of their indices."""
    return permuted(np.arange(num_examples, dtype=np.int64), num_examples, seed, epoch)


def permuted(
    places: NDArray[np.int64], num_examples: int, seed: int, epoch: int
) -> NDArray[np.int64]:
    """Return the rows at some places of an epoch's order, in time that depends on `places` only.

    A keyed Feistel network over the next even number of bits, walked until it falls inside the
    range: no table of `num_examples` entries, and the same on every NumPy version (whose own
    shuffles are only promised within one).
    """
    # At least 3: over 16 values the network prefers some orders of 4 rows by several per cent.
    num_half_bits = max(3, (int(num_examples - 1).bit_length() + 1) // 2)
    keys = _round_keys(seed, epoch)
    rows = _feistel(places.astype(np.uint64), num_half_bits, keys)
    outside = np.flatnonzero(rows >= num_examples)
    while outside.size:
        rows[outside] = _feistel(rows[outside], num_half_bits, keys)
        outside = outside[rows[outside] >= num_examples]
    return rows.astype(np.int64)


def _round_keys(seed: int, epoch: int) -> NDArray[np.uint64]:
    digest = hashlib.sha512(f"redco-flow epoch order {seed} {epoch}".encode()).digest()
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


@dataclass(frozen=True)
class BatchPlan:
    """The rows of every batch of a training or an evaluation.

    Args:
        num_examples: rows in the data; at least 1.
        global_batch_size: rows of one optimizer step over all devices and processes.
        seed: decides the order of each epoch; None keeps the rows in their own order.

    Raises:
        DataError: no examples, or a batch size below 1.
    """

    num_examples: int
    global_batch_size: int
    seed: int | None

    def __post_init__(self) -> None:
        if self.num_examples < 1:
            raise DataError("there are no examples to read: num_examples is 0, at least 1 needed.")
        if self.global_batch_size < 1:
            raise DataError(f"global_batch_size is {self.global_batch_size}, at least 1 needed.")

    @property
    def steps_per_epoch(self) -> int:
        """Batches per epoch, the last one perhaps partial."""
        return -(-self.num_examples // self.global_batch_size)

    def epoch(self, step: int) -> int:
        """Return the epoch, from 0, that a step (from 0) belongs to."""
        return step // self.steps_per_epoch

    def rows(self, step: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Return a step's row indices and mask, both [global_batch_size].

        A partial last batch repeats its first row with mask 0, so every row of the data has mask 1
        exactly once per epoch.
        """
        epoch, index = divmod(step, self.steps_per_epoch)
        start = index * self.global_batch_size
        stop = min(start + self.global_batch_size, self.num_examples)
        rows = np.arange(start, stop, dtype=np.int64)
        if self.seed is not None:
            rows = permuted(rows, self.num_examples, self.seed, epoch)
        num_missing = self.global_batch_size - len(rows)
        mask = np.ones(self.global_batch_size, np.float32)
        mask[len(rows) :] = 0
        return np.concatenate([rows, np.repeat(rows[:1], num_missing)]), mask

    def position(self, step: int) -> dict[str, int | None]:
        """Return the JSON cursor of "`step` batches were consumed", to be kept in a checkpoint."""
        return {
            "version": _POSITION_VERSION,
            "step": step,
            "num_examples": self.num_examples,
            "global_batch_size": self.global_batch_size,
            "seed": self.seed,
        }

    def step_at(self, position: Mapping[str, object]) -> int:
        """Return the next step of a cursor that `position` made.

        Raises:
            DataError: the cursor belongs to other data, batch size or seed; the order of the rows
                would silently differ. The message names every differing key.
        """
        step = position.get("step")
        if not isinstance(step, int) or step < 0:
            raise DataError(f"the data position has step {step!r}; a whole number is needed.")
        wanted = self.position(step)
        differing = [
            f"{key}: checkpoint {position.get(key)!r}, now {value!r}"
            for key, value in wanted.items()
            if position.get(key) != value
        ]
        if differing:
            raise DataError(
                f"the checkpoint's data position does not fit this training ({'; '.join(differing)}"
                "). Resume with the same data, global_batch_size and seed, or start afresh."
            )
        return step
