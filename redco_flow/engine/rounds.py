"""Train in rounds: collect examples with the parameters so far, train on them, collect again.

Reinforcement learning, self-training, active learning: what all of them need of a training is that
steps, epochs, the learning rate and checkpoints go on from round to round.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import numpy as np

from redco_flow.engine.data.batches import BatchIterator, Examples
from redco_flow.engine.data.order import check_positive
from redco_flow.engine.errors import DataError

# (params, number of the round, carry) -> (its examples, the next carry)
CollectFn = Callable[[Any, int, Any], tuple[Examples, Any]]

_CARRY = "carry"


@dataclass(frozen=True)
class Rounds:
    """Examples that are collected again in every round, for `Trainer.fit`.

        rounds = Rounds(collect, num_examples=4096, epochs_per_round=4)
        trainer.fit(rounds, num_epochs=4 * 50)

    All that `fit` counts goes on: 50 rounds of 4 epochs are 200 epochs, each with an order of its
    own, and one learning rate schedule. A checkpoint is saved after each round; a training that
    is killed collects the round's examples again.

    Args:
        collect: (params, number of the round from 0, carry) -> (examples, next carry). It must
            follow from these three alone, random numbers too, or a resumed training differs;
            every process calls it, and must get the same. `params` are valid until it returns.
        num_examples: of each round. Where there are fewer, fill up with ones of weight 0.
        epochs_per_round: passes over a round's examples.
        carry: what goes from round to round besides the parameters, and into checkpoints: a tree
            of NumPy arrays and numbers that keep their shapes and dtypes, as a replay buffer.

    Raises:
        ValueError: a number is not positive.
    """

    collect: CollectFn
    num_examples: int
    epochs_per_round: int = 1
    carry: Any = None

    def __post_init__(self) -> None:
        check_positive("num_examples", self.num_examples)
        check_positive("epochs_per_round", self.epochs_per_round)

    def __len__(self) -> int:
        return self.num_examples


class TrainsOnBatches(Protocol):
    """The interface through which rounds train on their examples; a `Trainer` has it."""

    @property
    def state(self) -> Any:
        """The state so far, with `params`."""

    def read_batches(self, examples: Examples, start_step: int, stop_step: int) -> BatchIterator:
        """Open this process' batches of these steps."""


class RoundBatches:
    """Opens the batches of a training in rounds.

    Args:
        trainer: collects with its parameters, and reads the examples.
        steps_per_round: optimizer steps.

    Attributes:
        beside: what a checkpoint holds beside the trainer's state: the carry, if there is one.
    """

    def __init__(self, rounds: Rounds, trainer: TrainsOnBatches, steps_per_round: int) -> None:
        self._rounds = rounds
        self._trainer = trainer
        self._steps_per_round = steps_per_round
        self.beside: dict[str, Any] = {} if rounds.carry is None else {_CARRY: rounds.carry}

    def open(self, start_step: int, stop_step: int) -> BatchIterator:
        """Collect the examples of the round that `start_step` is in, and read them.

        Raises:
            DataError: another number of examples, or a carry of another shape, than was said.
        """
        number = start_step // self._steps_per_round
        params, carry = self._trainer.state["params"], self.beside.get(_CARRY)
        examples, carry = self._rounds.collect(params, number, carry)
        if len(examples) != len(self._rounds):
            raise DataError(
                f"round {number}: collect gave {len(examples)} examples, num_examples is "
                f"{len(self._rounds)}: fill up with examples of weight 0, or leave some out."
            )
        _check_alike(number, carry, self._rounds.carry)
        if carry is not None:
            self.beside[_CARRY] = carry
        return self._trainer.read_batches(examples, start_step, stop_step)


def _check_alike(number: int, carry: Any, first: Any) -> None:
    """Find a carry that a checkpoint could not be restored into."""
    found, expected = (jax.tree.map(_described, tree) for tree in (carry, first))
    if found != expected:
        raise DataError(
            f"round {number}: collect gave a carry of {found}, Rounds was given {expected}: "
            "checkpoints need equal trees, shapes and dtypes."
        )


def _described(leaf: Any) -> str:
    array = np.asarray(leaf)
    return f"{array.dtype}{list(array.shape)}"
