"""Train a model given as three functions.

The Trainer owns the state and executes a `TrainingPlan`, which owns the steps; `training_loop.py`
says in which order things happen.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

from redco_flow.engine.callbacks import Callback
from redco_flow.engine.continuation import Continuation
from redco_flow.engine.data.batches import (
    Batch,
    BatchIterator,
    CollateFn,
    EvalBatches,
    Examples,
    TrainBatches,
)
from redco_flow.engine.data.length_buckets import Bucketing
from redco_flow.engine.data.order import (
    BatchLayout,
    BatchSampler,
    RowOrder,
    check_positive,
    fetch_late,
    put_early,
)
from redco_flow.engine.deployer import Deployer
from redco_flow.engine.errors import DataError
from redco_flow.engine.progress import RowLines
from redco_flow.engine.rounds import RoundBatches, Rounds
from redco_flow.engine.sharding.rules import ShardingRules
from redco_flow.engine.step.loss import LossFn
from redco_flow.engine.step.step import Metrics, MicroBatches, Schedule, State
from redco_flow.engine.step.trainable import Trainable
from redco_flow.engine.step_trace import TracedSteps
from redco_flow.engine.training_loop import FitResult, FitSchedule, TrainingLoop
from redco_flow.engine.training_plan import TrainingPlan
from redco_flow.engine.watching import EarlyStopping

if TYPE_CHECKING:
    from redco_flow.engine.checkpoint.checkpointer import Checkpointer, Commit

EvalFn = Callable[[Any, int], Mapping[str, float]]


class Trainer:
    """A model, its optimizer and its loss on a mesh.

    Args:
        deployer: where to run.
        collate_fn: examples -> dict of NumPy arrays whose leading dim is their number.
        loss_fn: (params, batch, rngs, is_training) -> (totals [B], weights [B]), whose sums give
            the mean; or a scalar, taken as the loss of equally weighted examples. A third value
            {name: totals [B]} is measured: the means by the same weights are logged in training.
            An example's numbers must not depend on the batch's other examples: a call gets a
            micro-batch's rows, or one data shard's of them. `rngs` holds one key per example;
            `is_training` is a Python bool.
        params: arrays; copied, and kept in `param_dtype`: compute in bfloat16 by casting inside
            the model.
        optimizer: any optax transformation. Accumulation and clipping are the Trainer's, so its
            schedule counts optimizer steps.
        sharding_rules: `deployer.get_sharding_rules(params, loss_fn, batch, None, False)`; with
            one model shard not needed.
        global_batch_size: examples per optimizer step, whatever the devices.
        per_device_batch_size: examples one data shard works on at once; the rest is accumulated.
        lr_schedule: the optimizer's schedule, to log the rate that each step used.
        seed: of data order and dropout; the deployer's by default.
        max_grad_norm: clip the whole batch's gradient to this 2-norm.
        on_nonfinite: what a loss, gradient or update that is NaN or infinite does. `"stop"` ends
            the training; `"skip"` leaves parameters and optimizer state as they are, counts, and
            goes on with the next batch.
        max_skipped: this many skipped steps in a row end the training.
        trainable: a regex searched in the parameters' paths, or (path, array) -> bool. The others
            are frozen: no gradients, no optimizer state, and they keep their dtype.
        param_dtype: of what is trained; float32 leaves what is wider as it is. With bfloat16 a
            micro-batch's gradients are bfloat16; sums over micro-batches, optimizer state and
            updates stay float32, and each new parameter is rounded to the nearest. An update
            under 1/512 of a parameter is then lost, and one up to 1/256 may be.

    Raises:
        ValueError: the batch does not divide (the message lists the nearest sizes that do), or a
            number is not positive.
        ShardingError: the rules do not fit the parameters, or there are several model shards and
            no rules.
    """

    def __init__(
        self,
        deployer: Deployer,
        *,
        collate_fn: CollateFn,
        loss_fn: LossFn,
        params: Any,
        optimizer: optax.GradientTransformation,
        sharding_rules: ShardingRules | None = None,
        global_batch_size: int,
        per_device_batch_size: int | None = None,
        lr_schedule: Schedule | None = None,
        seed: int | None = None,
        max_grad_norm: float | None = None,
        on_nonfinite: Literal["stop", "skip"] = "stop",
        max_skipped: int = 10,
        trainable: Trainable | None = None,
        param_dtype: str = "float32",
    ) -> None:
        plan = TrainingPlan(
            deployer,
            loss_fn=loss_fn,
            params=params,
            optimizer=optimizer,
            sharding_rules=sharding_rules,
            global_batch_size=global_batch_size,
            per_device_batch_size=per_device_batch_size,
            lr_schedule=lr_schedule,
            seed=seed,
            max_grad_norm=max_grad_norm,
            on_nonfinite=on_nonfinite,
            trainable=trainable,
            param_dtype=param_dtype,
        )
        self._execute(plan, collate_fn, params, max_skipped)

    @classmethod
    def from_plan(
        cls,
        plan: TrainingPlan,
        *,
        collate_fn: CollateFn,
        params: Any,
        max_skipped: int = 10,
        donate_params: bool = False,
    ) -> Trainer:
        """Return the trainer that executes a plan.

        Args:
            plan: for devices that are there.
            params: the model's, of the shapes that were planned; factors that the plan trains
                beside them are drawn from its seed.
            collate_fn, max_skipped: see the class.
            donate_params: the trainer may reuse the memory of `params`, which cannot be read
                afterwards: a model of more than half of a device's memory needs that.
        """
        trainer = cls.__new__(cls)
        trainer._execute(plan, collate_fn, params, max_skipped, donate_params=donate_params)
        return trainer

    def _execute(
        self,
        plan: TrainingPlan,
        collate_fn: CollateFn,
        params: Any,
        max_skipped: int,
        *,
        donate_params: bool = False,
    ) -> None:
        """Materialise a plan's state."""
        check_positive("max_skipped", max_skipped)
        self.plan = plan
        self.deployer, self.layout, self.seed = plan.deployer, plan.layout, plan.seed
        self.sharding_rules = plan.rules
        self.max_skipped = max_skipped
        self._collate_fn = collate_fn
        self._rows = self.deployer.put_rows(self.layout.split(self.layout.rows), dim=1)
        self._state: State = _start(plan, params, donate=donate_params)
        storage = plan.storage
        self._to_logical = jax.jit(storage.to_logical, out_shardings=storage.exact_sharding)
        self._to_storage = jax.jit(storage.to_storage, out_shardings=storage.stored_sharding)

    @property
    def state(self) -> State:
        """Parameters, optimizer state, step and seed, in their exact shapes.

        Not to be kept over a step or a restore, which reuse their memory; that of a state which is
        assigned, too.
        """
        state: State = self._state if self.plan.storage.is_exact else self._to_logical(self._state)
        return state

    @state.setter
    def state(self, state: State) -> None:
        self._state = state if self.plan.storage.is_exact else self._to_storage(state)

    @property
    def step(self) -> int:
        """Optimizer steps done; waits for the last one."""
        return int(self._state["step"])

    def fit(
        self,
        train_examples: Examples | Rounds,
        *,
        num_epochs: int | None = None,
        max_steps: int | None = None,
        bucketing: Bucketing | None = None,
        order: RowOrder | None = None,
        eval_examples: Examples | None = None,
        eval_fn: EvalFn | None = None,
        checkpointer: Checkpointer | None = None,
        callbacks: Sequence[Callback] = (),
        log_every_steps: int = 10,
        eval_every_steps: int | None = None,
        save_every_steps: int | None = None,
        save_every_epochs: int = 1,
        should_stop: Callable[[], bool] | None = None,
        traced_steps: TracedSteps | None = None,
        early_stopping: EarlyStopping | None = None,
        continuation: Continuation | None = None,
    ) -> FitResult:
        """Train for this number of epochs or steps, counted from the state's first step.

        With a checkpointer it resumes from the newest checkpoint, in mid-epoch too, and saves at
        every evaluation (with its metrics, in one commit) and at epochs' ends.

        With `Rounds` it collects examples as it goes. What is due at an epoch's end is due at a
        round's, and a stop waits for it: within a round nothing is saved.

        Args:
            train_examples: any sequence, or `Rounds`.
            num_epochs: passes over the examples; each is ceil(examples / global_batch_size)
                steps, and one of them may be a partial batch.
            max_steps: instead of num_epochs; epochs follow each other until they are done.
            bucketing: batch training examples of like length together; there is one compilation
                per bucket. Not with `Rounds`, whose examples are not known beforehand.
            order: in which examples are drawn, instead of each once per epoch: a `Mixture`. Not
                with bucketing or `Rounds`.
            eval_examples: their loss becomes the metric `eval_loss`.
            eval_fn: (params, step) -> further metrics; must not keep `params`.
            checkpointer: where to save and resume; None: nowhere.
            callbacks: told of log records, evaluations and checkpoints.
            log_every_steps: steps between log records.
            eval_every_steps: steps between evaluations; None: one per epoch. The last step is
                always evaluated.
            save_every_steps: steps between further checkpoints, without metrics.
            save_every_epochs: epochs between the checkpoints at their ends; the last is always
                saved. For epochs of a few steps.
            should_stop: asked after each step; True saves and ends. An evaluation that is due
                then comes first, so that a stop never changes what is computed.
            traced_steps: steps to trace with `jax.profiler`.
            early_stopping: ends the training after an evaluation without progress.
            continuation: of `plan_continuation`: the checkpoint of another training whose state,
                step and position in the data this one continues, unless it resumes from its own.
                Epochs and steps are counted from the first batch of the data.

        Raises:
            TrainingStopped: should_stop said so; the state is saved.
            NonFiniteLoss: the message names the step; nothing was saved after it. Where such
                steps are skipped: too many of them in a row.
            DataError: the newest checkpoint belongs to other data, batch size, seed or buckets;
                or rows cannot be read.
            CheckpointError: no checkpoint can be restored, or one cannot be written.
            ValueError: a number is not positive, or not a multiple of a round's; or there are
                rounds and buckets or an order; or epochs and steps, or neither.
        """
        rounds = train_examples if isinstance(train_examples, Rounds) else None
        if rounds is not None and (bucketing is not None or order is not None):
            raise ValueError(
                "bucketing and order are of examples known beforehand; rounds collect them."
            )
        schedule = FitSchedule(
            BatchSampler(
                len(train_examples),
                self.layout.global_batch_size,
                self.seed,
                bucketing.buckets if bucketing else None,
                order,
            ),
            num_epochs=num_epochs,
            max_steps=max_steps,
            log_every_steps=log_every_steps,
            eval_every_steps=eval_every_steps,
            save_every_steps=save_every_steps,
            save_every_epochs=save_every_epochs,
            epochs_per_round=None if rounds is None else rounds.epochs_per_round,
            first_step=0 if continuation is None else continuation.first_step,
        )

        def evaluate(step: int) -> dict[str, float]:
            metrics = {}
            if eval_examples is not None:
                metrics["eval_loss"] = self.eval_loss(eval_examples)
            for name, value in (eval_fn(self.state["params"], step) if eval_fn else {}).items():
                metrics[name] = float(value)
            return metrics

        will_evaluate = eval_examples is not None or eval_fn is not None
        loop = TrainingLoop(
            self,
            schedule,
            evaluate if will_evaluate else None,
            checkpointer,
            callbacks,
            should_stop,
            traced_steps,
            early_stopping,
            continuation,
        )
        if not isinstance(train_examples, Rounds):
            read = partial(self.read_batches, train_examples, bucketing=bucketing, order=order)
            return loop.run(read)
        batches = RoundBatches(train_examples, self, schedule.steps_per_round)
        loop.beside = batches.beside
        return loop.run(batches.open)

    def eval_loss(self, examples: Examples, *, bucketing: Bucketing | None = None) -> float:
        """Return the mean loss over `examples`: each once, without dropout.

        Args:
            bucketing: batch examples of like length together, by its functions instead of
                collate_fn; there is one compilation per bucket.

        Raises:
            DataError: there are no examples, or none that counts; rows cannot be read, or the
                buckets are of other examples.
        """
        layout = replace(self.layout, global_batch_size=self.layout.micro_batch_size, num_micro=1)
        batches = iter(
            EvalBatches(
                examples,
                self._collate_fn,
                batch_size=layout.global_batch_size,
                bucketing=bucketing,
                process_index=layout.process.index,
                num_processes=layout.process.count,
            )
        )

        params, seed = self._state["params"], self._state["seed"]
        lines = RowLines("evaluated", len(examples), tells_end=False)
        sums = []
        with batches:
            results = (
                (None, self.plan.eval_step(params, seed, b))
                for b in put_early(batches, partial(self._put, layout))
            )
            for _, found in fetch_late(results):
                sums.append((found["total"], found["weight"]))
                num_done = min(len(sums) * layout.global_batch_size, len(examples))
                lines.hear_rows(num_done)
        total, weight = np.sum(np.asarray(sums, np.float64), axis=0)
        if not weight:
            raise DataError(
                f"the loss of {len(examples)} examples has no mean, for loss_fn gave each a weight "
                "of 0: look at their labels."
            )
        return float(total / weight)

    def restore(
        self,
        checkpointer: Checkpointer,
        step: int | None = None,
        *,
        beside: dict[str, Any] | None = None,
    ) -> Commit:
        """Replace the state by a checkpoint's (the newest by default); return its commit.

        Args:
            beside: what was saved in the state beside the trainer's own, by name, as the carry of
                `Rounds` is; takes the checkpoint's values.

        Raises:
            CheckpointError: there is none, it is damaged, or has other parameters.
            OSError: it cannot be read; the trainer has no state until a restore succeeds.
        """
        beside = {} if beside is None else beside
        like = {**self.plan.storage.abstract_exact, **beside}
        state, commit = checkpointer.restore(step, like=like, before_reading=self._free)
        beside |= {name: state.pop(name) for name in beside}
        self.state = state
        return commit

    def continue_from(self, step_directory: Path) -> None:
        """Replace the state by another training's; random numbers follow this trainer's seed.

        Raises:
            CheckpointError: it is damaged, or has other parameters or optimizer state.
            RuntimeError: it is damaged where another process reads it.
        """
        # Orbax takes long to import.
        from redco_flow.engine.checkpoint.checkpointer import (
            check_checkpoint,
            restore_state,
            stored_arrays,
        )

        check_checkpoint(step_directory)
        names = list(self._state)
        own = {name: jnp.copy(self._state[name]) for name in ("seed", "skipped") if name in names}
        like = dict(self.plan.storage.abstract_exact)
        # Only a training that skips steps counts them.
        if "skipped" not in stored_arrays(step_directory):
            like.pop("skipped", None)
        elif "skipped" not in like:
            like["skipped"] = like["step"]
        restored = restore_state(step_directory, like, before_reading=self._free)
        state = {**own, **restored, "seed": own["seed"]}
        self.state = {name: state[name] for name in names}

    def _free(self) -> None:
        """Give back the memory of a state that another one is about to replace."""
        jax.tree.map(lambda leaf: leaf.delete(), self._state)

    @property
    def devices(self) -> Sequence[jax.Device]:
        """All devices that the steps are computed on, those of other processes included."""
        return list(self.plan.mesh.devices.flat)

    def model_flops(self, batch: MicroBatches) -> float | None:
        """Return a step's model FLOPs on such a batch; see `TrainingPlan.model_flops`."""
        return self.plan.model_flops(batch)

    def advance(self, batch: MicroBatches) -> Metrics:
        """Dispatch one optimizer step on a batch from `device_batches`; metrics come later."""
        metrics: Metrics
        self._state, metrics = self.plan.train_step(self._state, batch)
        return metrics

    def read_batches(
        self,
        examples: Examples,
        start_step: int,
        stop_step: int,
        *,
        bucketing: Bucketing | None = None,
        order: RowOrder | None = None,
    ) -> BatchIterator:
        """Open this process' training batches [start_step, stop_step); to be closed."""
        return iter(
            TrainBatches(
                examples,
                self._collate_fn,
                global_batch_size=self.layout.global_batch_size,
                seed=self.seed,
                bucketing=bucketing,
                order=order,
                start_step=start_step,
                stop_step=stop_step,
                process_index=self.layout.process.index,
                num_processes=self.layout.process.count,
            )
        )

    def device_batches(self, batches: Iterable[Batch]) -> Iterator[MicroBatches]:
        """Yield training batches as the steps take them, put on the devices early."""
        return put_early(batches, lambda batch: self._put(self.layout, batch, self._rows))

    def _put(
        self, layout: BatchLayout, batch: Batch, rows: jax.Array | None = None
    ) -> MicroBatches:
        """Put a batch; its rows are numbered by their place in the examples unless given."""
        numbers = batch.rows.astype(np.int32) if rows is None else ()
        host = layout.split((batch.arrays, batch.mask, numbers))
        arrays, mask, numbered = self.deployer.put_rows(host, dim=1)
        return {"batch": arrays, "mask": mask, "rows": numbered if rows is None else rows}


def _start(plan: TrainingPlan, params: Any, *, donate: bool) -> State:
    """Return the stored state before the first step, made in one program.

    Args:
        donate: it may take the memory of `params`.
    """
    storage = plan.storage
    shardings = plan.deployer.params_sharding(params, plan.model_rules)

    def start(params: Any) -> State:
        if not donate:  # the steps donate their state, which must not be the caller's arrays
            params = jax.tree.map(jnp.copy, params)
        if plan.lora is not None:
            params = plan.lora.start(params, jax.random.key(plan.seed))
        state: State = storage.to_storage(plan.start(params))
        return state

    options: dict[str, Any] = {"donate_argnums": 0} if donate else {}
    compiled = jax.jit(start, out_shardings=storage.stored_sharding, **options)
    with warnings.catch_warnings():  # of parameters that are stored in another dtype or padded
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
        state: State = compiled(jax.device_put(params, shardings))
    return state
