"""Steps on a state as it is stored, made of steps that know exact shapes alone.

Knows that storage may be padded; refuses to know what a step computes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from redco_flow.engine.padded_storage import PaddedStorage
from redco_flow.engine.train_step import Metrics, MicroBatches, State

TrainStep = Callable[[State, MicroBatches], tuple[State, Metrics]]
EvalStep = Callable[[Any, jax.Array, MicroBatches], Metrics]


def on_stored_state(step: TrainStep, storage: PaddedStorage) -> TrainStep:
    """Return the training step that takes and returns the stored state."""

    def train_step(stored: State, batch: MicroBatches) -> tuple[State, Metrics]:
        state, metrics = step(storage.open(stored), batch)
        return storage.close(state), metrics

    return train_step


def on_stored_params(step: EvalStep, storage: PaddedStorage) -> EvalStep:
    """Return the evaluation step that takes the stored parameters."""

    def eval_step(params: Any, seed: jax.Array, batch: MicroBatches) -> Metrics:
        return step(storage.open(params), seed, batch)

    return eval_step
