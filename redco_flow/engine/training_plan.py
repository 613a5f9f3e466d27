"""Plan a training from shapes alone: mesh, sharding, state storage and the train step's program.

A plan owns no array. The Trainer executes it, and what estimates memory or counts traffic lowers
the same step, also for devices that are not there.
Dims in this file: M micro-batches, B rows of one micro-batch over all data shards.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, Sharding

from redco_flow.engine.data.order import plan_batch
from redco_flow.engine.deployer import Deployer
from redco_flow.engine.sharding.fsdp import ModelStates
from redco_flow.engine.sharding.rules import ShardingRules
from redco_flow.engine.sharding.state import start_state
from redco_flow.engine.step.compiled import (
    jit_train_step,
    on_stored_params,
    on_unpadded_params,
    plan_state_storage,
)
from redco_flow.engine.step.lora import FACTORS, Lora
from redco_flow.engine.step.loss import LossFn
from redco_flow.engine.step.memory_estimate import estimate_step
from redco_flow.engine.step.model_flops import ModelFlops, trained_marks
from redco_flow.engine.step.step import (
    MicroBatches,
    Schedule,
    State,
    make_eval_step,
    make_train_step,
)
from redco_flow.engine.step.trainable import Trainable, restrict


@dataclass(frozen=True)
class StepMemory:
    """Bytes that a compiled step takes on each device, as its compiler counts them.

    Args:
        arguments: the state and one global batch.
        outputs: the next state and the metrics.
        aliased: outputs that reuse the arguments' memory.
        temporaries: activations, gradients, and all else that is made and dropped within a step.
        host_temporaries: those that are offloaded to the host's memory.
    """

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    host_temporaries: int

    @property
    def total(self) -> int:
        """Bytes of device memory at once."""
        return self.arguments + self.outputs - self.aliased + self.temporaries


class TrainingPlan:
    """All that is decided about a training before its parameters exist.

        plan = TrainingPlan(deployer, loss_fn=loss_fn, params=jax.eval_shape(init, key),
                            optimizer=optimizer, sharding_rules=rules, global_batch_size=64)
        plan.memory(batch).total  # bytes per device
        trainer = Trainer.from_plan(plan, params=init(key), collate_fn=collate_fn)

    Args:
        deployer: the mesh; its devices need not be there.
        params: shapes, as from `jax.eval_shape`, or arrays, which are not kept. With `lora` the
            model's, without factors.
        sharding_rules: of `params`, from `deployer.get_sharding_rules`; with one model shard not
            needed.
        lora: trains these factors beside the model's parameters, and nothing else; `loss_fn` is
            the model's.
        batch: what collate_fn makes, arrays or shapes, of any number of rows: the one that the
            step is lowered for where none is given.
        remat: the rematerialisation that loss_fn was made with; decides nothing here.
        loss_fn, optimizer, global_batch_size, per_device_batch_size, lr_schedule, seed,
            max_grad_norm, on_nonfinite, trainable, param_dtype: see `Trainer`.

    Attributes:
        layout: how a global batch is cut into micro-batches and over processes.
        model_rules: a PartitionSpec with its reason for each parameter of the model.
        rules: the same for all parameters of the state; with factors there are more.
        num_parameters, num_trained: elements of all parameters, factors included, and of those
            that are trained.
        storage: shapes, specs and padding of the whole state: `params`, `opt_state`, `step`, …
        train_step: the jitted (stored state, batch) -> (stored state, metrics).
        eval_step: the jitted (stored params, seed, batch of one micro-batch) -> metrics.

    Raises:
        ValueError: the batch does not divide (the message lists the nearest sizes that do), or a
            setting is out of its range; or both `lora` and `trainable` are given.
        ShardingError: the rules do not fit the parameters, or there are several model shards and
            no rules.
        EngineError: `trainable` leaves nothing to train.
    """

    def __init__(
        self,
        deployer: Deployer,
        *,
        loss_fn: LossFn,
        params: Any,
        optimizer: optax.GradientTransformation,
        sharding_rules: ShardingRules | None = None,
        lora: Lora | None = None,
        global_batch_size: int,
        per_device_batch_size: int | None = None,
        lr_schedule: Schedule | None = None,
        seed: int | None = None,
        max_grad_norm: float | None = None,
        on_nonfinite: Literal["stop", "skip"] = "stop",
        trainable: Trainable | None = None,
        param_dtype: str = "float32",
        batch: Any = None,
        remat: str | None = None,
    ) -> None:
        if on_nonfinite not in ("stop", "skip"):
            raise ValueError(f"on_nonfinite={on_nonfinite!r} is unknown; allowed: stop, skip.")
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ValueError(f"max_grad_norm={max_grad_norm} must be positive, or None.")
        if lora is not None and trainable is not None:
            raise ValueError("give lora or trainable, not both: lora freezes all of the model.")
        if not jnp.issubdtype(param_dtype, jnp.floating):
            raise ValueError(f"param_dtype={param_dtype!r} is no float: float32 or bfloat16.")
        params = shapes_of(params)
        trainable = trainable if lora is None else lora.trainable
        self.deployer = deployer
        self.seed = deployer.seed if seed is None else seed
        self.lora = lora
        self.remat = remat
        self.batch = None if batch is None else shapes_of(batch)
        self._model_states = ModelStates(params, optimizer, lora, trainable, param_dtype)
        self.model_rules = sharding_rules or deployer.get_sharding_rules(
            params,
            optimizer=optimizer,
            trainable=trainable,
            lora=lora,
            param_dtype=param_dtype,
        )
        self.layout = plan_batch(
            global_batch_size,
            per_device_batch_size,
            deployer.num_data_shards,
            deployer.data_process,
        )
        self.rules = self.model_rules
        model_loss, model_params = loss_fn, params
        if lora is not None:
            params, loss_fn = lora.shapes(params), lora.adapt_loss(loss_fn)
            self.rules = lora.rules(self.model_rules, params)
        optimizer, mask = restrict(optimizer, params, trainable)
        marks = lora.marks(model_params) if lora is not None else trained_marks(params, mask)
        self.num_parameters, self.num_trained = _count(model_params, params, mask, lora)
        self._flops = ModelFlops(model_loss, model_params, marks)
        kind: dict[str, Any] = {
            "counts_skipped": on_nonfinite == "skip",
            "trainable": mask,
            "param_dtype": param_dtype,
        }
        self._start: Callable[[Any], State] = partial(
            start_state, optimizer=optimizer, seed=self.seed, **kind
        )
        self.storage = plan_state_storage(deployer, params, optimizer, self.rules, **kind)
        loss_fn = on_unpadded_params(loss_fn, self.storage["params"])
        step = make_train_step(
            loss_fn,
            optimizer,
            lr_schedule=lr_schedule,
            max_grad_norm=max_grad_norm,
            trainable=mask,
            sharding=self.storage["params"].stored_sharding,
        )
        self.train_step = jit_train_step(deployer, step, self.storage)
        self.eval_step = deployer.jit(
            on_stored_params(make_eval_step(loss_fn), self.storage["params"]),
            out_shardings=deployer.named_sharding(),
        )

    def parameters_text(self) -> str:
        """Say how many parameters there are, and how many of them are trained if not all are."""
        text = self.model_rules.counts()
        if self.num_trained == self.num_parameters:
            return text
        share = self.num_trained / self.num_parameters
        of_all = f"{self.num_trained:,} of {self.num_parameters:,} ({share:.2%})"
        return f"{text}; trained {of_all}{', LoRA' if self.lora is not None else ''}"

    @property
    def mesh(self) -> Mesh:
        """The devices, arranged as (data, fsdp, context, model)."""
        return self.deployer.mesh

    @property
    def state(self) -> State:
        """Shapes and shardings of the state as the steps take it."""
        state: State = self.storage.abstract_stored
        return state

    @property
    def bytes_per_device(self) -> int:
        """Bytes of parameters, gradients and optimizer state on one device, padding included."""
        return self._model_states.bytes_per_device(self.model_rules)

    def start(self, params: Any) -> State:
        """Return the exact state before the first step; traceable.

        Args:
            params: of the state: with factors where there are some.
        """
        return self._start(params)

    def model_params(self, params: Any) -> Any:
        """Return the model's parameters of the trained ones: low-rank factors are added."""
        return params if self.lora is None else self._merge(params)

    @cached_property
    def _merge(self) -> Any:
        assert self.lora is not None
        base = self._model_states.params
        sharding = self.deployer.params_sharding(base, self.model_rules)
        return self.deployer.jit(self.lora.merge, out_shardings=sharding)

    def micro_batches(self, batch: Any = None) -> MicroBatches:
        """Return shapes and shardings of a global batch as the train step takes it.

        Args:
            batch: what collate_fn makes, of any number of rows; the plan's by default.

        Raises:
            ValueError: neither the plan nor the call has one, or leading dims differ.
        """
        batch = self.batch if batch is None else batch
        if batch is None:
            raise ValueError("the plan was made without a batch: pass one, as collate_fn makes it.")
        sizes = {np.shape(x)[0] for x in jax.tree.leaves(batch)}
        if len(sizes) != 1:
            raise ValueError(f"the batch's leading dims differ: {sorted(sizes)}; they must be one.")
        leading = (self.layout.num_micro, self.layout.micro_batch_size)
        rows = self.deployer.rows_sharding(dim=1)
        return {
            "batch": jax.tree.map(
                lambda x: _placed((*leading, *x.shape[1:]), x.dtype, rows), batch
            ),
            "mask": _placed(leading, jnp.float32, rows),
            "rows": _placed(leading, jnp.int32, rows),
        }

    def model_flops(self, batches: MicroBatches | None = None) -> float | None:
        """Return the operations that the model asks of one step, on all devices together.

        Rows and tokens that only pad count too; see `step.model_flops` for what is counted. Traced
        without a mesh, once for each shape; None, and the log says why, where that cannot tell.

        Args:
            batches: arrays or shapes as the train step takes them; the plan's own by default.
        """
        return self._flops.of_step(self.micro_batches() if batches is None else batches)

    def estimate_bytes(self, batch: Any = None) -> int:
        """Return about what `memory(batch).total` is, from the trace of the step alone."""
        return self._estimate if batch is None else self._estimate_for(batch)

    @cached_property
    def _estimate(self) -> int:
        return self._estimate_for(None)

    def _estimate_for(self, batch: Any) -> int:
        batches = self.micro_batches(batch)
        traced = self.train_step.trace(self.state, batches)
        return estimate_step(traced.jaxpr, self.state, batches)

    def lower(self, batch: Any = None) -> jax.stages.Lowered:
        """Lower the train step that the Trainer runs on such batches; see `micro_batches`.

        Raises:
            ValueError: as `micro_batches`, or loss_fn returned something else than a loss.
        """
        lowered: jax.stages.Lowered = self.train_step.lower(self.state, self.micro_batches(batch))
        return lowered

    def compile(self, batch: Any = None) -> jax.stages.Compiled:
        """Compile the train step ahead of time for the mesh's devices; see `lower`."""
        return self.lower(batch).compile()

    def memory(self, batch: Any = None) -> StepMemory:
        """Compile the train step and return the memory that it takes; see `lower`."""
        return step_memory(self.compile(batch))


def step_memory(compiled: jax.stages.Compiled) -> StepMemory:
    """Return the memory that a compiled step takes on each device."""
    found: Any = compiled.memory_analysis()
    return StepMemory(
        arguments=found.argument_size_in_bytes,
        outputs=found.output_size_in_bytes,
        aliased=found.alias_size_in_bytes,
        temporaries=found.temp_size_in_bytes,
        host_temporaries=found.host_temp_size_in_bytes,
    )


def shapes_of(tree: Any) -> Any:
    """Return the shapes and dtypes of a tree of arrays or shapes."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def _placed(shape: tuple[int, ...], dtype: Any, sharding: Sharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def _count(model_params: Any, params: Any, mask: Any, lora: Lora | None) -> tuple[int, int]:
    """Count parameters, those outside the model included, and trained parameters.

    Args:
        params: of the state: with factors where there are some.
        mask: a tree like `params`, of what is trained; None: all of it.
    """
    num_model = _num_elements(model_params)
    if mask is None:
        return num_model, num_model
    trained = jax.tree.map(lambda leaf, is_trained: leaf if is_trained else None, params, mask)
    num_added = _num_elements(trained[FACTORS]) if lora is not None else 0
    return num_model + num_added, _num_elements(trained)


def _num_elements(tree: Any) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))
