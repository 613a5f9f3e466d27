"""Continue a training from another training's checkpoint: at which batch reading starts.

A checkpoint's cursor has the data's position and the state of early stopping.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redco_flow.engine.checkpoint.commit import Commit, read_commit
from redco_flow.engine.data.order import BatchSampler

EARLY_STOPPING = "early_stopping"


def data_position(cursor: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a checkpoint's cursor that `BatchSampler.position` made."""
    return {name: value for name, value in cursor.items() if name != EARLY_STOPPING}


@dataclass(frozen=True)
class Continuation:
    """A committed step of another training, whose state a training continues.

    Args:
        directory: the step's.
        first_step: optimizer steps before the first batch of the data: 0 where all steps were
            done on the same data, in the same order.
        differences: why reading starts at the first batch, one message each; empty where it
            continues at the checkpoint's position.
    """

    directory: Path
    commit: Commit
    first_step: int
    differences: tuple[str, ...] = ()

    @property
    def early_stopping(self) -> Mapping[str, Any] | None:
        """The state of early stopping; None where scores are of other data."""
        found: Mapping[str, Any] | None = self.commit.cursor.get(EARLY_STOPPING)
        return None if self.differences else found


def plan_continuation(directory: Path, data: BatchSampler, *, other_rows: str = "") -> Continuation:
    """Return how a training on `data` continues a committed step.

    Args:
        other_rows: how the rows differ from those of the step's training; empty where they are
            the same. Their order is compared here.

    Raises:
        CheckpointError: no commit, or a damaged one.
    """
    commit = read_commit(directory)
    position = data_position(commit.cursor)
    differences = [other_rows] if other_rows else data.differences(position)
    done = 0 if differences else int(position["step"])
    return Continuation(directory, commit, commit.step - done, tuple(differences))
