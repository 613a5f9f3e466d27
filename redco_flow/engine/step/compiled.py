"""Put the train step on a mesh: how its state is stored, and its program."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import jax
import optax

from redco_flow.engine.deployer import Deployer
from redco_flow.engine.sharding.fused_use import compute_by_shard
from redco_flow.engine.sharding.rules import ShardingRules, join, named_leaves
from redco_flow.engine.sharding.state import fused_layout, state_layout
from redco_flow.engine.sharding.storage import PaddedStorage
from redco_flow.engine.step.gathering import gather_where_used
from redco_flow.engine.step.step import Metrics, MicroBatches, State

TrainStep = Callable[[State, MicroBatches], tuple[State, Metrics]]
EvalStep = Callable[[Any, jax.Array, MicroBatches], Metrics]

logger = logging.getLogger(__name__)


def on_unpadded_params(
    function: Callable[..., Any], storage: PaddedStorage, *, is_trained: bool = True
) -> Callable[..., Any]:
    """Return `function(params, *inputs)` for parameters as they lie, apart from their padding.

    Args:
        function: its inputs are trees of arrays and Python values; those are passed as they are.
        storage: the parameters'.
        is_trained: whether it is differentiated: the gradient of what several kernels read is then
            added up before it is reduced over the model shards.
    """
    paths = [join(path) for path, _ in named_leaves(storage.shapes)]

    def tell(numbers: frozenset[int]) -> None:
        logger.warning(
            "%s: used otherwise than in the function that the sharding rules were derived from; "
            "its fused parts move between shards.",
            ", ".join(paths[number] for number in sorted(numbers)),
        )

    parts = storage.split_leaves if is_trained else storage.fused_leaves
    by_shard = compute_by_shard(function, parts, tell)
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


def plan_state_storage(
    deployer: Deployer,
    params: Any,
    optimizer: optax.GradientTransformation,
    rules: ShardingRules,
    *,
    counts_skipped: bool = False,
    trainable: Any = None,
    param_dtype: str = "float32",
) -> PaddedStorage:
    """Say how the whole state lies on the mesh: the optimizer's arrays as their parameters.

    Args:
        params: arrays or shapes.
        counts_skipped: whether the state counts steps that changed nothing.
        trainable: a tree of bools; None: all parameters.
        param_dtype: of what is trained.
    """
    shapes, specs = state_layout(
        params,
        optimizer,
        rules,
        counts_skipped=counts_skipped,
        trainable=trainable,
        param_dtype=param_dtype,
    )
    return deployer.storage(shapes, specs, fused_layout(shapes, rules))


def jit_train_step(deployer: Deployer, step: TrainStep, storage: PaddedStorage) -> Any:
    """Return the compiled function (stored state, batch) -> (stored state, metrics).

    It reuses the memory of the state that it is given.
    """
    return deployer.jit(
        on_stored_state(step, storage),
        donate_argnums=0,
        out_shardings=(storage.stored_sharding, deployer.named_sharding()),
    )
