"""One optimizer step, and one evaluation step, as pure functions of arrays.

The state is a plain dict: params, opt_state, step, seed.
Dims in this file: M micro-batches, B rows of one micro-batch.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypedDict

import jax
import jax.numpy as jnp
import optax
from jax.extend.core import ClosedJaxpr
from jax.sharding import PartitionSpec

from redco_flow.engine.sharding.mesh import (
    DATA_AXIS,
    equations,
    equations_inside,
    names_axis,
    takes_axis,
)
from redco_flow.engine.step.loss import LossFn, per_example_loss
from redco_flow.engine.step.trainable import merge, select


class Sums(NamedTuple):
    """Sums over examples, float32 scalars: of totals, of weights, and of measures by name."""

    total: jax.Array
    weight: jax.Array
    measures: Mapping[str, jax.Array] = {}


# (params, micro-batch) -> sums over its rows
SumFn = Callable[[Any, Any], Sums]


def mean_gradients(sum_fn: SumFn, params: Any, micro_batches: Any) -> tuple[Any, Sums]:
    """Return the gradients of sum(totals) / sum(weights), and all sums.

    Args:
        sum_fn: the sum of totals is differentiated.
        micro_batches: a tree of arrays (M, B, ...).

    Returns:
        Gradients, float32 or wider, sharded like the parameters; zero where all weights are.
    """
    gradients, sums = _accumulate(sum_fn, params, micro_batches)
    divisor = safe_divisor(sums.weight)
    return jax.tree.map(lambda g: g / divisor.astype(g.dtype), gradients), sums


def safe_divisor(weight: jax.Array) -> jax.Array:
    """Return the weight, or 1 where there is none, so that nothing over nothing is zero."""
    return jnp.where(weight > 0, weight, jnp.ones_like(weight))


def global_norm(gradients: Any) -> jax.Array:
    """Return the 2-norm of all gradients together, float32.

    A sum of squares per array keeps every gradient where it is; raveling them first would gather
    the sharded ones.
    """
    squares = [jnp.sum(jnp.square(g.astype(jnp.float32))) for g in jax.tree.leaves(gradients)]
    return jnp.sqrt(sum(squares, jnp.zeros((), jnp.float32)))


def clip(gradients: Any, norm: jax.Array, max_norm: float) -> Any:
    """Scale gradients of 2-norm `norm` down to `max_norm` where they are longer."""
    scale = max_norm / jnp.maximum(norm, max_norm)
    return jax.tree.map(lambda g: (g * scale).astype(g.dtype), gradients)


def _accumulate(sum_fn: SumFn, params: Any, micro_batches: Any) -> tuple[Any, Sums]:
    def total_and_sums(params: Any, micro_batch: Any) -> tuple[jax.Array, Sums]:
        sums = sum_fn(params, micro_batch)
        return sums.total, sums

    differentiate = jax.grad(total_and_sums, has_aux=True)
    (num_micro,) = {x.shape[0] for x in jax.tree.leaves(micro_batches)}
    if num_micro == 1:
        only = jax.tree.map(lambda x: x[0], micro_batches)
        gradients, sums = differentiate(params, only)
        return _widen(gradients), sums
    empty = (_widen(jax.tree.map(jnp.zeros_like, params)), jnp.zeros((), jnp.float32))
    local = on_local_rows(differentiate, params, micro_batches)
    if local is None:
        return _add_up(differentiate, params, micro_batches, empty)
    of_shards = _add_up(local.of_rows, params, local.micro_batches, local_zeros(empty))
    gradients, sums = jax.tree.map(lambda x: jnp.sum(x, axis=0), of_shards)
    return gradients, sums


def _add_up(
    differentiate: Callable[[Any, Any], tuple[Any, Sums]],
    params: Any,
    micro_batches: Any,
    empty: tuple[Any, jax.Array],
) -> tuple[Any, Sums]:
    """Return gradients and sums over the micro-batches; `empty` are zeros like both."""

    def add_one(carry: Any, micro_batch: Any) -> tuple[Any, Mapping[str, jax.Array]]:
        gradients, (total, weight, measures) = differentiate(params, micro_batch)
        return jax.tree.map(jnp.add, carry, (_widen(gradients), total, weight)), measures

    gradients, zero = empty
    start = (gradients, zero, zero)
    (gradients, total, weight), measures = jax.lax.scan(add_one, start, micro_batches)
    return gradients, Sums(total, weight, jax.tree.map(lambda x: jnp.sum(x, axis=0), measures))


def _widen(gradients: Any) -> Any:
    return jax.tree.map(lambda g: g.astype(jnp.promote_types(g.dtype, jnp.float32)), gradients)


State = dict[str, Any]
# Scalars by name, but for `measures`: those of the loss function, by theirs.
Metrics = dict[str, Any]
Schedule = Callable[[Any], Any]


class MicroBatches(TypedDict):
    """A global batch as the steps take it.

    Keys:
        batch: what collate_fn made, (M, B, ...) each.
        mask: float32 (M, B); 0 for rows that only pad.
        rows: int32 (M, B); each row's number in the global batch.
    """

    batch: Any
    mask: Any
    rows: Any


def initial_state(params: Any, optimizer: optax.GradientTransformation, seed: int) -> State:
    """Return the state before the first step."""
    return {
        "params": params,
        "opt_state": optimizer.init(params),
        "step": jnp.zeros((), jnp.int32),
        "seed": jnp.asarray(seed, jnp.uint32),
    }


def counting_skipped(state: State) -> State:
    """Add `skipped`, the number of steps that changed nothing, to a state before the first."""
    return {**state, "skipped": jnp.zeros((), jnp.int32)}


def example_keys(seed: jax.Array, step: jax.Array | int, rows: jax.Array) -> jax.Array:
    """Return one key per row: the same for (seed, step, row) on any mesh and after a resume."""
    of_step = jax.random.fold_in(jax.random.key(seed), step)
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(of_step, rows)


def make_train_step(
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    *,
    lr_schedule: Schedule | None = None,
    max_grad_norm: float | None = None,
    trainable: Any = None,
    sharding: Any = None,
) -> Callable[[State, MicroBatches], tuple[State, Metrics]]:
    """Return the function (state, batch) -> (next state, metrics).

    Args:
        trainable: a tree of bools: which parameters have gradients; None: all. The optimizer must
            keep state for those alone, see `trainable.only_trainable`.
        sharding: a tree of the parameters' shardings, for their gradients; None: the compiler's
            choice.

    The metrics are float32 scalars: the loss' sums `total`, `weight` and `measures`, `grad_norm`
    before clipping, and `learning_rate` as `lr_schedule` gives it for this optimizer step. A state
    with `skipped` stays as it is where loss, gradient or update are not finite, apart from `step`
    and `skipped`; the metric `is_skipped` says so.
    """

    def train_step(state: State, batches: MicroBatches) -> tuple[State, Metrics]:
        params = state["params"]
        mask = jax.tree.map(lambda _: True, params) if trainable is None else trainable

        def sums(trained: Any, micro_batch: MicroBatches) -> Sums:
            merged = merge(trained, params, mask)
            return masked_sums(loss_fn, merged, micro_batch, state["seed"], state["step"])

        trained = select(params, mask)
        gradients, summed = mean_gradients(sums, trained, batches)
        if sharding is not None:
            # Otherwise the compiler may update a replicated parameter in parts, as its gradient
            # was computed, and gather the parameter and each of the optimizer's arrays.
            placed = select(sharding, mask)
            gradients = jax.tree.map(jax.lax.with_sharding_constraint, gradients, placed)
        norm = global_norm(gradients)
        if max_grad_norm is not None:
            gradients = clip(gradients, norm, max_grad_norm)
        # Weight decay is of the parameters: in float32, as everything that is added to them.
        wide = _widen(trained)
        updates, opt_state = optimizer.update(gradients, state["opt_state"], wide)
        metrics: Metrics = {**summed._asdict(), "grad_norm": norm}
        if lr_schedule is not None:
            # The optimizer's own count: that of the steps that changed something.
            num_done = state["step"] - state.get("skipped", 0)
            metrics["learning_rate"] = jnp.asarray(lr_schedule(num_done), jnp.float32)
        next_state = {
            **state,
            "params": merge(optax.apply_updates(trained, updates), params, mask),
            "opt_state": opt_state,
            "step": state["step"] + 1,
        }
        if "skipped" in state:
            is_finite = (
                jnp.isfinite(summed.total) & jnp.isfinite(norm) & jnp.isfinite(global_norm(updates))
            )
            next_state = _keep_unless(is_finite, next_state, state)
            metrics["is_skipped"] = (~is_finite).astype(jnp.float32)
        return next_state, metrics

    return train_step


def _keep_unless(is_finite: jax.Array, next_state: State, state: State) -> State:
    """Take the next parameters and optimizer state only where they are finite."""
    changed = {
        key: jax.tree.map(lambda new, old: jnp.where(is_finite, new, old), next_state[key], old)
        for key, old in state.items()
        if key in ("params", "opt_state")
    }
    return {**next_state, **changed, "skipped": state["skipped"] + ~is_finite}


def make_eval_step(loss_fn: LossFn) -> Callable[[Any, jax.Array, MicroBatches], Metrics]:
    """Return the function (params, seed, batch of one micro-batch) -> {"total", "weight"}."""

    def eval_step(params: Any, seed: jax.Array, batches: MicroBatches) -> Metrics:
        only: MicroBatches = jax.tree.map(lambda x: x[0], batches)
        sums = masked_sums(loss_fn, params, only, seed, 0, is_training=False)
        return {"total": sums.total, "weight": sums.weight}

    return eval_step


def masked_sums(
    loss_fn: LossFn,
    params: Any,
    micro_batch: MicroBatches,
    seed: jax.Array,
    step: jax.Array | int,
    *,
    is_training: bool = True,
) -> Sums:
    """Return the sums over the rows that do not only pad."""
    rngs = example_keys(seed, step, micro_batch["rows"])
    batch, mask = micro_batch["batch"], micro_batch["mask"]
    results = per_example_loss(loss_fn, params, batch, rngs, is_training=is_training)
    return Sums(*jax.tree.map(lambda x: jnp.sum(x * mask), results))


# (params, rows) -> anything
OfRows = Callable[[Any, Any], Any]

# What chooses for itself how it runs on devices, or has no sure way to run on one shard's rows,
# unless a shard_map that takes the axis has it run there. cuDNN's attention refuses a bias that
# heads share there.
_INDIVISIBLE = re.compile(r"custom_partitioning|pallas_call|dot_product_attention.*")

logger = logging.getLogger(__name__)


class Local(NamedTuple):
    """A function of (params, (N, B / N, ...)), its results (N, ...), and micro-batches for it."""

    of_rows: OfRows
    micro_batches: Any


def on_local_rows(of_rows: OfRows, params: Any, micro_batches: Any) -> Local | None:
    """Return `of_rows` as each data shard computes it alone, on its part of a micro-batch.

    There `data` is the name of a mapped axis: what runs on shards in its own way must take that
    mesh axis too and leave it out of its specs. None where there is one shard, or where the
    function does what has no counterpart on a part: the log says what.

    Args:
        micro_batches: a tree of arrays (M, B, ...), split over the data shards along B.
    """
    num_shards = _num_data_shards()
    if num_shards == 1 or any(x.shape[1] % num_shards for x in jax.tree.leaves(micro_batches)):
        return None
    # All rows of a micro-batch: what names the axis may need a multiple of the shards.
    rows = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), micro_batches)
    if obstacle := _find_obstacle(_trace_mapped(of_rows, params, rows)):
        logger.info(
            "gradients are added up over the %d data shards in every micro-batch, not once a "
            "step: the function to train has %s.", num_shards, obstacle,
        )  # fmt: skip
        return None
    split = jax.tree.map(
        lambda x: x.reshape(x.shape[0], num_shards, -1, *x.shape[2:]), micro_batches
    )
    return Local(_mapped(of_rows, in_axes=(None, 0)), split)


def local_zeros(like: Any) -> Any:
    """Return zeros (N, ...) of a tree of arrays (...), one for each data shard."""
    free = PartitionSpec.UNCONSTRAINED

    def zeros(x: jax.Array) -> jax.Array:
        spec = PartitionSpec(DATA_AXIS, *[free] * x.ndim)
        stacked = jnp.zeros((_num_data_shards(), *x.shape), x.dtype)
        placed: jax.Array = jax.lax.with_sharding_constraint(stacked, spec)
        return placed

    return jax.tree.map(zeros, like)


def _num_data_shards() -> int:
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty else dict(mesh.shape).get(DATA_AXIS, 1)


def _mapped(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return jax.vmap(function, axis_name=DATA_AXIS, spmd_axis_name=DATA_AXIS, **options)


def _trace_mapped(of_rows: OfRows, params: Any, rows: Any) -> ClosedJaxpr:
    """Return what is traced of the function where it is mapped, before it is."""
    found = []

    def trace(shard: jax.Array) -> jax.Array:
        found.append(jax.make_jaxpr(of_rows)(params, rows))
        return shard

    jax.eval_shape(_mapped(trace), jnp.arange(_num_data_shards()))
    return found[0]


def _find_obstacle(traced: ClosedJaxpr) -> str | None:
    if traced.effects:
        return "effects, such as callbacks"
    on_shards = {
        id(inner)
        for equation in equations(traced.jaxpr)
        if equation.primitive.name == "shard_map" and takes_axis(equation, DATA_AXIS)
        for inner in equations_inside(equation)
    }
    for equation in equations(traced.jaxpr):
        name = equation.primitive.name
        if _INDIVISIBLE.fullmatch(name) and id(equation) not in on_shards:
            return f"a {name}"
        if names_axis(equation, DATA_AXIS):
            return f"a {name} that names the mesh axis {DATA_AXIS!r}"
        if name == "shard_map" and not takes_axis(equation, DATA_AXIS):
            return f"a {name} that leaves the mesh axis {DATA_AXIS!r} to the compiler"
        if equation.params.get("vmap_method", "") is None:
            return f"a {name} without a vmap_method"
    return None
