"""The training loop: step, log, evaluate, save a checkpoint, stop.

Everything that depends on *when* is here: no step is waited for right after its dispatch, and no
checkpoint is written before every earlier step's loss was seen to be finite.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import jax
import numpy as np

from redco_flow.engine.callbacks import Callback
from redco_flow.engine.continuation import EARLY_STOPPING, Continuation, data_position
from redco_flow.engine.data.batches import BatchIterator
from redco_flow.engine.data.order import BatchSampler, LateFetch, check_multiple, check_positive
from redco_flow.engine.errors import NonFiniteLoss, TrainingStopped
from redco_flow.engine.progress import TrainingLines, peak_memory_bytes, utilization
from redco_flow.engine.step.step import MicroBatches
from redco_flow.engine.step_trace import StepTrace, TracedSteps
from redco_flow.engine.watching import EarlyStopping, SkippedSteps, StepWatch

if TYPE_CHECKING:
    from redco_flow.engine.checkpoint.checkpointer import Checkpointer
    from redco_flow.engine.checkpoint.commit import Commit

Evaluate = Callable[[int], dict[str, float]]
# (first step, the one after the last) -> this process' batches
OpenBatches = Callable[[int, int], BatchIterator]

# A step that takes this many medians is logged.
SLOW_FACTOR = 10.0


@dataclass(frozen=True)
class FitSchedule:
    """The length of a training, and the steps after which to log, evaluate and save.

    Args:
        num_epochs, max_steps: one of the two; the other is None.
        epochs_per_round: epochs on the same examples, where others are collected then: nothing is
            saved within them. None: the examples never change.
        first_step: optimizer steps that another training did before the first batch; evaluations
            and checkpoints are due at intervals from there.

    Raises:
        ValueError: a number is not positive, or would end or save within a round; or not exactly
            one of num_epochs and max_steps is given.
    """

    data: BatchSampler
    num_epochs: int | None
    log_every_steps: int
    eval_every_steps: int | None
    save_every_steps: int | None
    save_every_epochs: int = 1
    epochs_per_round: int | None = None
    max_steps: int | None = None
    first_step: int = 0

    def __post_init__(self) -> None:
        for name, number in vars(self).items():
            if name not in ("data", "first_step") and number is not None:
                check_positive(name, number)
        if (self.num_epochs is None) == (self.max_steps is None):
            raise ValueError("give either num_epochs or max_steps, not both and not neither.")
        if self.epochs_per_round is None:
            return
        if self.num_epochs is not None:
            rounds = f"rounds of {self.epochs_per_round} epochs"
            check_multiple("num_epochs", self.num_epochs, self.epochs_per_round, rounds)
        rounds = "the steps of a round, within which nothing can be saved"
        for name in ("max_steps", "eval_every_steps", "save_every_steps"):
            if getattr(self, name) is not None:
                check_multiple(name, getattr(self, name), self.steps_per_round, rounds)

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole training."""
        if self.num_epochs is None:
            assert self.max_steps is not None  # one of the two is given
            return self.first_step + self.max_steps
        return self.first_step + self.num_epochs * self.data.steps_per_epoch

    @property
    def steps_per_round(self) -> int:
        """Optimizer steps on the same examples; of an epoch, where examples never change."""
        return (self.epochs_per_round or 1) * self.data.steps_per_epoch

    def spans(self, start: int) -> Iterator[tuple[int, int]]:
        """Yield what is left after `start` steps, as (first, last) steps done on equal examples."""
        length = self.total_steps - self.first_step
        if self.epochs_per_round is not None:
            length = self.steps_per_round
        while start < self.total_steps:
            stop = start - (start - self.first_step) % length + length
            yield start, stop
            start = stop

    def step_at(self, cursor: Mapping[str, Any]) -> int:
        """Return the optimizer steps done where a checkpoint of this training has this cursor.

        Raises:
            DataError: the cursor belongs to other data.
        """
        return self.first_step + self.data.step_at(data_position(cursor))

    def epoch(self, step: int) -> float:
        """Return how many epochs are done after `step` steps."""
        return (step - self.first_step) / self.data.steps_per_epoch

    def is_round_end(self, step: int) -> bool:
        """Whether a round, or an epoch where there are none, is complete after `step` steps."""
        return (step - self.first_step) % self.steps_per_round == 0

    def can_stop_after(self, step: int) -> bool:
        """Whether a training saved after `step` steps can be resumed: not within a round."""
        return self.epochs_per_round is None or self.is_round_end(step)

    def logs_after(self, step: int) -> bool:
        """Whether a log record is due after `step` steps."""
        return step % self.log_every_steps == 0 or step == self.total_steps

    def evaluates_after(self, step: int) -> bool:
        """Whether an evaluation is due after `step` steps."""
        if step == self.total_steps:
            return True
        if self.eval_every_steps is None:
            return self.is_round_end(step)
        return (step - self.first_step) % self.eval_every_steps == 0

    def saves_after(self, step: int) -> bool:
        """Whether a checkpoint without an evaluation is due after `step` steps."""
        if step == self.total_steps:
            return True
        done = step - self.first_step
        steps_of_epochs = self.save_every_epochs * self.data.steps_per_epoch
        if self.is_round_end(step) and done % steps_of_epochs == 0:
            return True
        return self.save_every_steps is not None and done % self.save_every_steps == 0


@dataclass(frozen=True)
class FitResult:
    """The result of a training.

    Args:
        step: optimizer steps done, over all attempts; fewer than planned where early stopping
            ended it.
        start_step: where this call began; above 0 after a resume.
        loss: mean training loss of the last log record; None if no step was left to do.
        metrics: of the last evaluation.
    """

    step: int
    start_step: int
    loss: float | None
    metrics: Mapping[str, float]


@dataclass
class _Window:
    """Sums over the steps since the last log record."""

    total: float = 0.0
    weight: float = 0.0
    measures: dict[str, float] = field(default_factory=dict)
    num_steps: int = 0
    timed_weight: float = 0.0
    seconds: float = 0.0
    evaluation_seconds: float = 0.0
    checkpoints_seconds: float = 0.0
    # Of the steps that were timed; None once the model FLOPs of one of them are not known.
    flops: float | None = 0.0

    def add_time(self, weight: float, seconds: float, flops: float | None) -> None:
        """Count a step that was timed."""
        self.timed_weight += weight
        self.seconds += seconds
        self.flops = None if self.flops is None or flops is None else self.flops + flops

    def add(self, found: Mapping[str, Any]) -> None:
        """Count a step that changed the parameters."""
        self.total += float(found["total"])
        self.weight += float(found["weight"])
        for name, total in found["measures"].items():
            self.measures[name] = self.measures.get(name, 0.0) + float(total)
        self.num_steps += 1

    def mean(self) -> float:
        return self.total / self.weight if self.weight else 0.0

    def mean_measures(self) -> dict[str, float]:
        return {name: sum_ / (self.weight or 1.0) for name, sum_ in self.measures.items()}


class _Dispatched(NamedTuple):
    """A step on its way, and its model FLOPs."""

    step: int
    flops: float | None


class Trained(Protocol):
    """The interface through which the loop takes steps; a `Trainer` has it."""

    max_skipped: int
    state: Any

    @property
    def devices(self) -> Sequence[jax.Device]:
        """All devices that the steps are computed on."""

    @property
    def step(self) -> int:
        """Optimizer steps done; waits for the last one."""

    def device_batches(self, batches: Iterable[Any]) -> Iterator[MicroBatches]:
        """Return the batches on the devices."""

    def model_flops(self, batch: MicroBatches) -> float | None:
        """Return the model FLOPs of a step, of all devices together; None if they are not known."""

    def advance(self, batch: MicroBatches) -> Any:
        """Dispatch one step; return its metrics, which come later."""

    def restore(
        self,
        checkpointer: Checkpointer,
        step: int | None = None,
        *,
        beside: dict[str, Any] | None = None,
    ) -> Commit:
        """Replace the state, and what was saved beside it, by a checkpoint's; return its commit."""

    def continue_from(self, step_directory: Path) -> None:
        """Replace the state by another training's."""


@dataclass
class TrainingLoop:
    """One call of `Trainer.fit`.

    Args:
        beside: what is saved in the state beside the trainer's own; a resume changes it in place.
    """

    trainer: Trained
    schedule: FitSchedule
    evaluate: Evaluate | None
    checkpointer: Checkpointer | None
    callbacks: Sequence[Callback]
    should_stop: Callable[[], bool] | None
    traced_steps: TracedSteps | None = None
    early_stopping: EarlyStopping | None = None
    continuation: Continuation | None = None
    beside: dict[str, Any] = field(default_factory=dict)
    _late: LateFetch[_Dispatched] = field(default_factory=LateFetch)
    _window: _Window = field(default_factory=_Window)
    _skips: SkippedSteps = field(init=False)
    _watch: StepWatch = field(default_factory=lambda: StepWatch(SLOW_FACTOR))
    _last_fetch: float | None = None
    _shapes: set[tuple[tuple[int, ...], ...]] = field(default_factory=set)
    _loss: float | None = None
    _found: Mapping[str, Any] = field(default_factory=dict)  # a step's metrics, of the last one
    _is_asked_to_stop: bool = False
    _metrics: dict[str, float] = field(default_factory=dict)
    _unannounced: deque[dict[str, Any]] = field(default_factory=deque)
    _lines: TrainingLines = field(init=False)

    def __post_init__(self) -> None:
        self._skips = SkippedSteps(self.trainer.max_skipped)
        self._lines = TrainingLines(self.schedule.total_steps, devices=self.trainer.devices)

    def run(self, open_batches: OpenBatches) -> FitResult:
        """Train to the end of the schedule."""
        start = step = self._resume()
        if start >= self.schedule.total_steps or self._ends_early():
            return FitResult(start, start, None, dict(self._metrics))
        with StepTrace(self.traced_steps, start) as trace:
            for first, stop in self.schedule.spans(start):
                done = self.schedule.first_step
                with open_batches(first - done, stop - done) as batches:
                    step = self._train(batches, first, trace)
                if self._ends_early():
                    self._log_rest(step)
                    break
        self._wait_for_saves()
        return FitResult(step, start, self._loss, dict(self._metrics))

    def _ends_early(self) -> bool:
        return self.early_stopping is not None and self.early_stopping.is_due

    def _train(self, batches: BatchIterator, first: int, trace: StepTrace) -> int:
        """Take a step on each batch, after `first` steps; return how many are done then."""
        step = first
        for step, batch in enumerate(self.trainer.device_batches(batches), first + 1):
            if step == first + 1 and self._last_fetch is not None:
                # Collecting a round's examples and reading the first of them is no step's time.
                self._last_fetch = time.perf_counter()
            flops = self._expect(batch)
            if trace.begins_at(step):
                self._await_steps()
                trace.start(step)
                self._last_fetch = time.perf_counter()
            dispatched = _Dispatched(step, flops)
            with trace.dispatching(step):
                found = self.trainer.advance(batch)
            self._hear(self._late.push(dispatched, found))
            if trace.ends_at(step):
                self._await_steps()
                trace.stop()
                self._last_fetch = time.perf_counter()
            self._after(step)
            if self._ends_early():
                break
        self._await_steps()
        return step

    def _expect(self, batch: MicroBatches) -> float | None:
        """Let the steps before a new shape end: what it takes to compile is no step's time.

        Returns the step's model FLOPs.
        """
        shape = tuple(np.shape(array) for array in jax.tree.leaves(batch))
        if shape not in self._shapes:
            self._shapes.add(shape)
            self._await_steps()
            self._last_fetch = None
        return self.trainer.model_flops(batch)

    def _await_steps(self) -> None:
        """Wait for all steps that were dispatched, and account for them."""
        self._hear(self._late.drain())

    def _resume(self) -> int:
        """Restore the newest checkpoint, or that to continue; return the steps already done."""
        if self.checkpointer is None or self.checkpointer.resumable() is None:
            if self.continuation is not None:
                self.trainer.continue_from(self.continuation.directory)
                if self.early_stopping is not None:
                    self.early_stopping.restore(self.continuation.early_stopping)
            return self.trainer.step
        commit = self.trainer.restore(self.checkpointer, beside=self.beside)
        if self.early_stopping is not None:
            self.early_stopping.restore(commit.cursor.get(EARLY_STOPPING))
        step = self.schedule.step_at(commit.cursor)
        self._metrics = {k: v for k, v in commit.metrics.items() if v is not None}
        self._lines.hear_restored(step)
        return step

    def _after(self, step: int) -> None:
        """Do what is due after a step's dispatch."""
        evaluates = self.evaluate is not None and self.schedule.evaluates_after(step)
        is_stopping = self._is_stopping(step)
        if not (is_stopping or evaluates or self.schedule.saves_after(step)):
            return
        self._await_steps()
        metrics = self._evaluate(step) if evaluates else None
        if metrics is not None and self.early_stopping is not None:
            self.early_stopping.hear(step, metrics)
        # A process that stops may be killed soon: the last checkpoint takes the shortest way.
        is_last = is_stopping or step == self.schedule.total_steps or self._ends_early()
        started = time.perf_counter()
        self._save(step, metrics, through_local=not is_last)
        self._window.checkpoints_seconds += time.perf_counter() - started
        # Nothing is in flight now: the next step's time starts here.
        self._last_fetch = time.perf_counter()
        if is_stopping and step < self.schedule.total_steps and not self._ends_early():
            self._wait_for_saves()
            raise TrainingStopped(step)

    def _is_stopping(self, step: int) -> bool:
        """Ask after each step, as it is a sign of life too; stop where that can be saved."""
        if self.should_stop is not None and self.should_stop():
            self._is_asked_to_stop = True
        return self._is_asked_to_stop and self.schedule.can_stop_after(step)

    def _hear(self, results: Iterable[tuple[_Dispatched, Mapping[str, Any]]]) -> None:
        """Account for steps whose metrics have arrived."""
        for (step, flops), found in results:
            window, now, seconds = self._window, time.perf_counter(), None
            self._found = found
            if counts := self._skips.count(step, found):
                window.add(found)
            if self._last_fetch is not None:
                seconds = now - self._last_fetch
                self._watch.hear(step, seconds)
                window.add_time(float(found["weight"]), seconds, flops)
            self._last_fetch = now
            self._lines.hear_step(step, found, counts=counts, seconds=seconds, model_flops=flops)
            if self.schedule.logs_after(step):
                self._log(step, found)

    def _log_rest(self, step: int) -> None:
        """Log the steps since the last record, after the last one of all."""
        if self._window.num_steps:
            self._log(step, self._found)

    def _log(self, step: int, found: Mapping[str, Any]) -> None:
        if not self._window.num_steps:
            # Every step since the last record was skipped: there is no loss to tell of.
            self._announce_saved()
            return
        window, self._window = self._window, _Window()
        self._loss, measures = window.mean(), window.mean_measures()
        _check_finite(step, "measure", measures)
        record: dict[str, Any] = {
            "step": step,
            "total_steps": self.schedule.total_steps,
            "epoch": self.schedule.epoch(step),
            "loss": self._loss,
            **measures,
        }
        if not found.get("is_skipped"):
            record["grad_norm"] = float(found["grad_norm"])
        if "is_skipped" in found:
            record["num_skipped"] = self._skips.num_skipped
        if "learning_rate" in found:
            record["learning_rate"] = float(found["learning_rate"])
        if window.seconds > 0:
            record["tokens_per_second"] = window.timed_weight / window.seconds
            record["step_seconds"] = self._watch.median_seconds
        record["steps_seconds"] = window.seconds
        record["evaluation_seconds"] = window.evaluation_seconds
        record["checkpoints_seconds"] = window.checkpoints_seconds
        record |= self._utilization(window)
        if (peak := peak_memory_bytes(self.trainer.devices)) is not None:
            record["peak_memory_bytes"] = peak
        for callback in self.callbacks:
            callback.on_log(dict(record))
        self._announce_saved()

    def _utilization(self, window: _Window) -> dict[str, float]:
        if window.seconds <= 0 or not window.flops:
            return {}
        return utilization(window.flops, window.seconds, self.trainer.devices)

    def _evaluate(self, step: int) -> dict[str, float]:
        assert self.evaluate is not None
        started = time.perf_counter()
        metrics = self.evaluate(step)
        _check_finite(step, "metric", metrics)
        self._metrics = metrics
        record = {"step": step, "epoch": self.schedule.epoch(step), **metrics}
        seconds = time.perf_counter() - started
        self._window.evaluation_seconds += seconds
        self._lines.hear_evaluation(step, metrics, seconds)
        for callback in self.callbacks:
            callback.on_eval({**record, "seconds": seconds})
        return metrics

    def _save(self, step: int, metrics: dict[str, float] | None, *, through_local: bool) -> None:
        if self.checkpointer is None:
            return
        # The last save is waited for in any case; told now, it is still there to be looked at.
        self._wait_for_saves()
        for callback in self.callbacks:
            callback.on_save(step)
        cursor = self.schedule.data.position(step - self.schedule.first_step)
        if self.early_stopping is not None:
            cursor[EARLY_STOPPING] = self.early_stopping.to_json()
        state = {**self.trainer.state, **self.beside}
        self.checkpointer.save(
            step, state, metrics=metrics, cursor=cursor, through_local=through_local
        )
        self._lines.hear_saved(step)
        record = {"step": step, "epoch": self.schedule.epoch(step), "metrics": metrics}
        self._unannounced.append(record)

    def _wait_for_saves(self) -> None:
        if self.checkpointer is not None:
            self.checkpointer.wait()
            self._announce_saved()

    def _announce_saved(self) -> None:
        """Tell of the checkpoints that were committed since; a save alone promises nothing."""
        if self.checkpointer is None or not self._unannounced:
            return
        newest = self.checkpointer.latest() or 0
        while self._unannounced and self._unannounced[0]["step"] <= newest:
            record = self._unannounced.popleft()
            self._lines.hear_committed(record["step"])
            for callback in self.callbacks:
                callback.on_checkpoint(dict(record))


def _check_finite(step: int, what: str, values: Mapping[str, float]) -> None:
    for name, value in values.items():
        if not math.isfinite(value):
            raise NonFiniteLoss(step, f"the {what} {name} after step {step} is {value}.")
