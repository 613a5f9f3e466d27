"""Steps on a state as it is stored, made of steps that know exact shapes alone."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import jax

from redco_flow.engine.fused_use import compute_by_shard
from redco_flow.engine.gathering import gather_where_used
from redco_flow.engine.padded_storage import PaddedStorage
from redco_flow.engine.parameter_paths import join, named_leaves
from redco_flow.engine.train_step import Metrics, MicroBatches, State

TrainStep = Callable[[State, MicroBatches], tuple[State, Metrics]]
EvalStep = Callable[[Any, jax.Array, MicroBatches], Metrics]

logger = logging.getLogger(__name__)


def on_unpadded_params(function: Callable[..., Any], storage: PaddedStorage) -> Callable[..., Any]:
    """Return `function(params, *inputs)` for parameters as they lie, apart from their padding.

    Args:
        function: its inputs are trees of arrays and Python values; those are passed as they are.
        storage: the parameters'.
    """
    paths = [join(path) for path, _ in named_leaves(storage.shapes)]

    def tell(numbers: frozenset[int]) -> None:
        logger.warning(
            "%s: used otherwise than in the function that the sharding rules were derived from; "
            "its fused parts move between shards.",
            ", ".join(paths[number] for number in sorted(numbers)),
        )

    by_shard = compute_by_shard(function, storage.fused_leaves, tell)
    return gather_where_used(by_shard, storage)


def on_stored_state(step: TrainStep, storage: PaddedStorage) -> TrainStep:
    """Return the training step that takes and returns the stored state."""

    def train_step(stored: State, batch: MicroBatches) -> tuple[State, Metrics]:
        state, metrics = step(storage.unpad(stored), batch)
        return storage.pad(state), metrics

    return train_step


def on_stored_params(step: EvalStep, storage: PaddedStorage) -> EvalStep:
    """Return the evaluation step that takes the stored parameters."""

    def eval_step(params: Any, seed: jax.Array, batch: MicroBatches) -> Metrics:
        return step(storage.unpad(params), seed, batch)

    return eval_step
