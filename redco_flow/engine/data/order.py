"""Which rows make up which batch: pure arithmetic on (seed, global batch size, step).

Nothing here reads an example or keeps a position: batch `step` is computed from its number alone,
so a resumed run, a run on other devices and an uninterrupted run read the same rows. Knows no
processes beyond a slice of the global batch, and no collating.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from redco_flow.engine.data.length_buckets import LengthBuckets, permuted
from redco_flow.engine.errors import DataError

_POSITION_VERSION = 1


def epoch_order(num_examples: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return the order in which an epoch visits the rows: a permutation of their indices."""
    return permuted(np.arange(num_examples, dtype=np.int64), num_examples, seed, epoch)


@dataclass(frozen=True)
class BatchSampler:
    """The rows of every batch of a training or an evaluation.

    Args:
        num_examples: rows in the data; at least 1.
        global_batch_size: rows of one optimizer step over all devices and processes.
        seed: decides the order of each epoch; None keeps the rows in their own order.
        buckets: batch rows of like length together.

    Raises:
        DataError: no examples, a batch size below 1, or buckets of other data.
    """

    num_examples: int
    global_batch_size: int
    seed: int | None
    buckets: LengthBuckets | None = None

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
        return position

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
            for key, value in {**dict.fromkeys(position), **wanted}.items()
            if position.get(key) != value
        ]
        if differing:
            raise DataError(
                f"the checkpoint's data position does not fit this training ({'; '.join(differing)}"
                "). Resume with the same data, global_batch_size and seed, or start afresh."
            )
        return step
