"""In which order training, logging, evaluating, saving and stopping happen.

Everything that depends on *when* is here: no step is waited for right after its dispatch, and no
checkpoint is written before every earlier step's loss was seen to be finite.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import jax
import numpy as np

from redco_flow.engine.callbacks import Callback
from redco_flow.engine.data.batches import BatchIterator
from redco_flow.engine.data.layout import LateFetch, check_positive
from redco_flow.engine.data.order import BatchPlan
from redco_flow.engine.errors import NonFiniteLoss, Stopped
from redco_flow.engine.progress import TrainingLines
from redco_flow.engine.step.step import MicroBatches
from redco_flow.engine.watching import SkippedSteps, StepWatch

if TYPE_CHECKING:
    from redco_flow.engine.checkpoint.checkpointer import Checkpointer
    from redco_flow.engine.checkpoint.commit import Commit

Evaluate = Callable[[int], dict[str, float]]
# (first step, the one after the last) -> this process' batches
OpenBatches = Callable[[int, int], BatchIterator]

# A step that takes so many medians is told of.
SLOW_FACTOR = 10.0


@dataclass(frozen=True)
class Plan:
    """How long to train, and what is due after which step.

    Raises:
        ValueError: a number is not positive.
    """

    data: BatchPlan
    num_epochs: int
    log_every_steps: int
    eval_every_steps: int | None
    save_every_steps: int | None

    def __post_init__(self) -> None:
        for name in ("num_epochs", "log_every_steps", "eval_every_steps", "save_every_steps"):
            if getattr(self, name) is not None:
                check_positive(name, getattr(self, name))

    @property
    def total_steps(self) -> int:
        """Optimizer steps of all epochs."""
        return self.num_epochs * self.data.steps_per_epoch

    def epoch(self, step: int) -> float:
        """Return how many epochs are done after `step` steps."""
        return step / self.data.steps_per_epoch

    def is_epoch_end(self, step: int) -> bool:
        """Whether an epoch is complete after `step` steps."""
        return step % self.data.steps_per_epoch == 0

    def logs_after(self, step: int) -> bool:
        """Whether a log record is due after `step` steps."""
        return step % self.log_every_steps == 0 or step == self.total_steps

    def evaluates_after(self, step: int) -> bool:
        """Whether an evaluation is due after `step` steps."""
        if step == self.total_steps or self.eval_every_steps is None:
            return self.is_epoch_end(step)
        return step % self.eval_every_steps == 0

    def saves_after(self, step: int) -> bool:
        """Whether a checkpoint without an evaluation is due after `step` steps."""
        every = self.save_every_steps
        return self.is_epoch_end(step) or (every is not None and step % every == 0)


@dataclass(frozen=True)
class FitResult:
    """What a training came to.

    Args:
        step: optimizer steps done, over all attempts.
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


class Trained(Protocol):
    """What takes the steps: a `Trainer`."""

    max_skipped: int
    state: Any

    @property
    def step(self) -> int:
        """Optimizer steps done; waits for the last one."""

    def device_batches(self, batches: Iterable[Any]) -> Iterator[MicroBatches]:
        """Return the batches on the devices."""

    def advance(self, batch: MicroBatches) -> Any:
        """Dispatch one step; return its metrics, which come later."""

    def restore(self, checkpointer: Checkpointer, step: int | None = None) -> Commit:
        """Replace the state by a checkpoint's; return its commit."""


@dataclass
class TrainingLoop:
    """One call of `Trainer.fit`."""

    trainer: Trained
    plan: Plan
    evaluate: Evaluate | None
    checkpointer: Checkpointer | None
    callbacks: Sequence[Callback]
    should_stop: Callable[[], bool] | None
    _late: LateFetch[int] = field(default_factory=LateFetch)
    _window: _Window = field(default_factory=_Window)
    _skips: SkippedSteps = field(init=False)
    _watch: StepWatch = field(default_factory=lambda: StepWatch(SLOW_FACTOR))
    _last_fetch: float | None = None
    _shapes: set[tuple[tuple[int, ...], ...]] = field(default_factory=set)
    _loss: float | None = None
    _metrics: dict[str, float] = field(default_factory=dict)
    _unannounced: deque[dict[str, Any]] = field(default_factory=deque)
    _lines: TrainingLines = field(init=False)

    def __post_init__(self) -> None:
        self._skips = SkippedSteps(self.trainer.max_skipped)
        self._lines = TrainingLines(self.plan.total_steps)

    def run(self, open_batches: OpenBatches) -> FitResult:
        """Train to the end of the plan."""
        start = self._resume()
        if start >= self.plan.total_steps:
            return FitResult(start, start, None, dict(self._metrics))
        with open_batches(start, self.plan.total_steps) as batches:
            for step, batch in enumerate(self.trainer.device_batches(batches), start + 1):
                self._expect(batch)
                self._hear(self._late.push(step, self.trainer.advance(batch)))
                self._after(step)
        self._hear(self._late.drain())
        self._wait_for_saves()
        return FitResult(self.plan.total_steps, start, self._loss, dict(self._metrics))

    def _expect(self, batch: MicroBatches) -> None:
        """Let the steps before a new shape end: what it takes to compile is no step's time."""
        shape = tuple(np.shape(array) for array in jax.tree.leaves(batch))
        if shape not in self._shapes:
            self._shapes.add(shape)
            self._hear(self._late.drain())
            self._last_fetch = None

    def _resume(self) -> int:
        """Restore the newest checkpoint, if there is one; return the steps already done."""
        if self.checkpointer is None or self.checkpointer.latest() is None:
            return self.trainer.step
        commit = self.trainer.restore(self.checkpointer)
        step = self.plan.data.step_at(commit.cursor)
        self._metrics = {k: v for k, v in commit.metrics.items() if v is not None}
        self._lines.hear_restored(step)
        return step

    def _after(self, step: int) -> None:
        """Do what is due after a step's dispatch."""
        evaluates = self.evaluate is not None and self.plan.evaluates_after(step)
        is_stopping = self.should_stop is not None and self.should_stop()
        if not (is_stopping or evaluates or self.plan.saves_after(step)):
            return
        self._hear(self._late.drain())
        metrics = self._evaluate(step) if evaluates else None
        self._save(step, metrics)
        # Nothing is in flight now: the next step's time starts here.
        self._last_fetch = time.perf_counter()
        if is_stopping and step < self.plan.total_steps:
            self._wait_for_saves()
            raise Stopped(step)

    def _hear(self, results: Iterable[tuple[int, Mapping[str, Any]]]) -> None:
        """Account for steps whose metrics have arrived."""
        for step, found in results:
            window, now, seconds = self._window, time.perf_counter(), None
            if counts := self._skips.count(step, found):
                window.add(found)
            if self._last_fetch is not None:
                seconds = now - self._last_fetch
                self._watch.hear(step, seconds)
                window.seconds += seconds
                window.timed_weight += float(found["weight"])
            self._last_fetch = now
            self._lines.hear_step(step, found, counts=counts, seconds=seconds)
            if self.plan.logs_after(step):
                self._log(step, found)

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
            "total_steps": self.plan.total_steps,
            "epoch": self.plan.epoch(step),
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
        for callback in self.callbacks:
            callback.on_log(dict(record))
        self._announce_saved()

    def _evaluate(self, step: int) -> dict[str, float]:
        assert self.evaluate is not None
        started = time.perf_counter()
        metrics = self.evaluate(step)
        _check_finite(step, "metric", metrics)
        self._metrics = metrics
        record = {"step": step, "epoch": self.plan.epoch(step), **metrics}
        seconds = time.perf_counter() - started
        self._lines.hear_evaluation(step, metrics, seconds)
        for callback in self.callbacks:
            callback.on_eval({**record, "seconds": seconds})
        return metrics

    def _save(self, step: int, metrics: dict[str, float] | None) -> None:
        if self.checkpointer is None:
            return
        # The last save is waited for in any case; told now, it is still there to be looked at.
        self._wait_for_saves()
        for callback in self.callbacks:
            callback.on_save(step)
        cursor = self.plan.data.position(step)
        self.checkpointer.save(step, self.trainer.state, metrics=metrics, cursor=cursor)
        self._lines.hear_saved(step)
        record = {"step": step, "epoch": self.plan.epoch(step), "metrics": metrics}
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
