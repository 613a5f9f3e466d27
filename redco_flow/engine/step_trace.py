"""Trace some optimizer steps with `jax.profiler`: what the devices and the host do in them.

Only the first process traces, its own devices. The directory appears once the trace in it is
whole, so a kill in the middle leaves none.
"""

from __future__ import annotations

import logging
import shutil
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from redco_flow.engine.data.order import check_positive

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TracedSteps:
    """The steps to trace, and the folder of the trace.

    Args:
        directory: for TensorBoard, Perfetto or XProf; replaced if it is there.
        start_step: the first of them; a training's first is 1.
        num_steps: how many.

    Raises:
        ValueError: a number is not positive.
    """

    directory: Path
    start_step: int
    num_steps: int

    def __post_init__(self) -> None:
        check_positive("start_step", self.start_step)
        check_positive("num_steps", self.num_steps)

    @property
    def last_step(self) -> int:
        """The last of them."""
        return self.start_step + self.num_steps - 1


class StepTrace:
    """The trace of one call of `Trainer.fit`; enter it before the first step.

    A profiler that fails is warned of and ends no training.

    Args:
        asked: None: nothing is traced.
        steps_done: where the training goes on. A trace whose first steps are done already is of
            the others.
    """

    def __init__(self, asked: TracedSteps | None, steps_done: int) -> None:
        self._asked = asked if jax.process_index() == 0 else None
        self._steps_done = steps_done
        self._first: int | None = None
        self._is_open = False

    def __enter__(self) -> StepTrace:
        return self

    def __exit__(self, *_: object) -> None:
        """Keep what was traced; say so where nothing was."""
        if self._is_open:
            self.stop()
        asked = self._asked
        if asked is None or self._first is not None:
            return
        if self._steps_done >= asked.last_step:
            logger.info("no profile: its steps were done before, the training goes on after them.")
        else:
            logger.warning(
                "no profile: the training ended after step %d, before step %d where it begins.",
                self._steps_done, asked.start_step,
            )  # fmt: skip

    def begins_at(self, step: int) -> bool:
        """Whether to `start` before this step is dispatched."""
        asked = self._asked
        return (
            asked is not None
            and self._first is None
            and asked.start_step <= step <= asked.last_step
        )

    def start(self, step: int) -> None:
        """Begin with this step; those before it must have ended."""
        assert self._asked is not None
        self._first = step
        try:
            shutil.rmtree(self._unfinished, ignore_errors=True)
            # A folder that cannot be made is found before the profiler runs, not after.
            self._unfinished.mkdir(parents=True)
            jax.profiler.start_trace(str(self._unfinished))
            self._is_open = True
        except Exception as error:  # noqa: BLE001 (a profile that fails ends no training)
            _warn(error)

    def dispatching(self, step: int) -> AbstractContextManager[Any]:
        """Return what to dispatch the step in, so that its trace names it."""
        self._steps_done = step
        if not self._is_open:
            return nullcontext()
        return jax.profiler.StepTraceAnnotation("train", step_num=step)

    def ends_at(self, step: int) -> bool:
        """Whether to `stop` once this step has ended."""
        return self._is_open and self._asked is not None and step >= self._asked.last_step

    def stop(self) -> None:
        """Write the trace; its steps must have ended."""
        assert self._asked is not None
        self._is_open = False
        try:
            jax.profiler.stop_trace()
            shutil.rmtree(self._asked.directory, ignore_errors=True)
            self._unfinished.rename(self._asked.directory)
        except Exception as error:  # noqa: BLE001 (a profile that fails ends no training)
            _warn(error)
            return
        logger.info(
            "profile of steps %s to %d: %s", self._first, self._steps_done, self._asked.directory
        )

    @property
    def _unfinished(self) -> Path:
        assert self._asked is not None
        directory = self._asked.directory
        return directory.with_name(f".{directory.name}.unfinished")


def _warn(error: Exception) -> None:
    logger.warning("no profile, for it failed: %s: %s", type(error).__name__, error)
