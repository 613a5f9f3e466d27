"""Put the train step on a mesh: how its state is stored, and its program.

The Trainer runs this program, and what estimates its memory or counts its traffic lowers the same
one from shapes alone.
Dims in this file: M micro-batches, B rows of one micro-batch over all data shards.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from redco_flow.engine.deployer import Deployer
from redco_flow.engine.sharding.fused_use import compute_by_shard
from redco_flow.engine.sharding.rules import ShardingRules, join, named_leaves
from redco_flow.engine.sharding.state import fused_layout, state_layout
from redco_flow.engine.sharding.storage import PaddedStorage
from redco_flow.engine.step.gathering import gather_where_used
from redco_flow.engine.step.loss import LossFn
from redco_flow.engine.step.step import (
    Metrics,
    MicroBatches,
    Schedule,
    State,
    make_train_step,
)
from redco_flow.engine.step.trainable import Trainable, restrict

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


# XLA for GPUs computes while it reduces and gathers only if told to; for TPUs it does anyway.
_OVERLAP_ON_GPUS = {
    "xla_gpu_enable_latency_hiding_scheduler": True,
    "xla_gpu_enable_pipelined_all_gather": True,
    "xla_gpu_enable_pipelined_all_reduce": True,
    "xla_gpu_enable_pipelined_reduce_scatter": True,
}


def plan_state_storage(
    deployer: Deployer,
    params: Any,
    optimizer: optax.GradientTransformation,
    rules: ShardingRules,
    *,
    counts_skipped: bool = False,
    trainable: Any = None,
) -> PaddedStorage:
    """Say how the whole state lies on the mesh: the optimizer's arrays as their parameters.

    Args:
        params: arrays or shapes.
        counts_skipped: whether the state counts steps that changed nothing.
        trainable: a tree of bools; None: all parameters.
    """
    shapes, specs = state_layout(
        params, optimizer, rules, counts_skipped=counts_skipped, trainable=trainable
    )
    return deployer.storage(shapes, specs, fused_layout(shapes, rules))


def jit_train_step(deployer: Deployer, step: TrainStep, storage: PaddedStorage) -> Any:
    """Return the compiled function (stored state, batch) -> (stored state, metrics).

    It reuses the memory of the state that it is given.
    """
    on_gpus = deployer.mesh.devices.flat[0].platform == "gpu"
    return jax.jit(
        deployer.on_mesh(on_stored_state(step, storage)),
        donate_argnums=0,
        out_shardings=(storage.stored_sharding, deployer.named_sharding()),
        compiler_options=_OVERLAP_ON_GPUS if on_gpus else None,
    )


def lower_train_step(
    deployer: Deployer,
    loss_fn: LossFn,
    params: Any,
    optimizer: optax.GradientTransformation,
    rules: ShardingRules,
    batch: Any,
    *,
    num_micro: int = 1,
    lr_schedule: Schedule | None = None,
    max_grad_norm: float | None = None,
    trainable: Trainable | None = None,
) -> jax.stages.Lowered:
    """Lower the Trainer's step without any array: `.compile()` tells its memory and its HLO.

    Args:
        params: arrays or shapes, as the Trainer is given them.
        batch: a tree of arrays or shapes (B, ...): one micro-batch over all data shards.
        num_micro: micro-batches per optimizer step.
        lr_schedule, max_grad_norm, trainable, loss_fn, optimizer: see `Trainer`.

    Raises:
        ShardingError: the rules do not fit the parameters.
        ValueError: loss_fn returned something else than a loss, or leading dims differ.
    """
    optimizer, mask = restrict(optimizer, params, trainable)
    storage = plan_state_storage(deployer, params, optimizer, rules, trainable=mask)
    stored = jax.eval_shape(storage.to_storage, storage.shapes)
    state = jax.tree.map(_placed, stored, storage.stored_sharding)
    rows = deployer.rows_sharding(dim=1)
    micro_batches = jax.tree.map(lambda x: _placed(x, rows), _micro_shapes(batch, num_micro))
    loss_fn = on_unpadded_params(loss_fn, storage["params"])
    step = make_train_step(
        loss_fn,
        optimizer,
        lr_schedule=lr_schedule,
        max_grad_norm=max_grad_norm,
        trainable=mask,
    )
    lowered: jax.stages.Lowered = jit_train_step(deployer, step, storage).lower(
        state, micro_batches
    )
    return lowered


def _micro_shapes(batch: Any, num_micro: int) -> MicroBatches:
    sizes = {x.shape[0] for x in jax.tree.leaves(batch)}
    if len(sizes) != 1:
        raise ValueError(f"the batch's leading dims differ: {sorted(sizes)}; they must be one.")
    (num_rows,) = sizes
    return {
        "batch": jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((num_micro, *x.shape), x.dtype), batch
        ),
        "mask": jax.ShapeDtypeStruct((num_micro, num_rows), jnp.float32),
        "rows": jax.ShapeDtypeStruct((num_micro, num_rows), jnp.int32),
    }


def _placed(shape: Any, sharding: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)
