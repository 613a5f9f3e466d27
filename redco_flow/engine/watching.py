"""Monitors of a training: non-finite steps, slow steps, early stopping by a score.

The step itself decides whether to skip a non-finite update; the monitors see it some steps
later.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections import deque
from collections.abc import Mapping
from typing import Any, Literal

from redco_flow.engine.data.order import check_positive
from redco_flow.engine.errors import NonFiniteLoss

logger = logging.getLogger(__name__)


class SkippedSteps:
    """Counts skipped steps and raises where there are too many.

    Args:
        max_skipped: this many in a row end the training.
    """

    def __init__(self, max_skipped: int) -> None:
        self._max_skipped = max_skipped
        self._num_in_a_row = 0
        self.num_skipped = 0

    def count(self, step: int, found: Mapping[str, Any]) -> bool:
        """Return whether a step changed the parameters, given its metrics.

        Raises:
            NonFiniteLoss: it is not finite and steps are not skipped, or too many were.
        """
        if "is_skipped" not in found:
            _check_finite(step, found)
            return True
        if not found["is_skipped"]:
            self._num_in_a_row = 0
            return True
        self.num_skipped += 1
        self._num_in_a_row += 1
        logger.warning(
            "step %d is skipped, its loss, gradient or update is not finite (loss %s, norm %s); "
            "%d in a row", step, found["total"], found["grad_norm"], self._num_in_a_row,
        )  # fmt: skip
        if self._num_in_a_row >= self._max_skipped:
            raise NonFiniteLoss(
                step,
                f"{self._num_in_a_row} steps in a row, up to step {step}, had a loss, gradient or "
                "update that is not finite and were skipped; training stopped. Lower the learning "
                "rate, clip gradients (max_grad_norm), or look at the examples of those steps.",
            )
        return False


def _check_finite(step: int, found: Mapping[str, Any]) -> None:
    if not math.isfinite(found["total"]):
        raise NonFiniteLoss(step)
    if not math.isfinite(found["grad_norm"]):
        raise NonFiniteLoss(
            step,
            f"the gradient at step {step} is not finite although the loss is; training stopped "
            "before any later checkpoint. Look at the examples of that step, or compute in "
            "float32.",
        )


# With fewer of them there is nothing to compare with.
_MIN_STEPS = 8
_NUM_REMEMBERED = 64


class StepWatch:
    """Warns of steps that are slow compared with the median of the last 64.

    Args:
        factor: times the median is slow; `None` never warns.
    """

    def __init__(self, factor: float | None) -> None:
        self._factor = factor
        self._seconds: deque[float] = deque(maxlen=_NUM_REMEMBERED)

    @property
    def median_seconds(self) -> float:
        """The median time of the last 64 steps; NaN before the first."""
        return statistics.median(self._seconds or [math.nan])

    def hear(self, step: int, seconds: float) -> bool:
        """Take in a step's time; return whether it was slow, and was warned of."""
        is_slow = False
        if self._factor is not None and len(self._seconds) >= _MIN_STEPS:
            median = self.median_seconds
            is_slow = seconds > self._factor * median
            if is_slow:
                logger.warning(
                    "step %d took %.3g s, %.1f times the median of %.3g s; look at this host's "
                    "load, its data source and the other hosts", step, seconds,
                    seconds / median, median,
                )  # fmt: skip
        self._seconds.append(seconds)
        return is_slow


class EarlyStopping:
    """Ends a training whose score no longer improves.

    What it has seen is kept in each checkpoint, so that a resumed training ends at the same step.

    Args:
        metric: a name among an evaluation's metrics.
        mode: whether a larger or a smaller score is better; one that equals the best is not.
        patience: this many evaluations in a row without a better score end the training.
    """

    def __init__(self, metric: str, mode: Literal["max", "min"], patience: int) -> None:
        check_positive("patience", patience)
        self._metric, self._mode, self._patience = metric, mode, patience
        self._best: float | None = None
        self._num_worse = 0

    @property
    def is_due(self) -> bool:
        """Whether the training is to end."""
        return self._num_worse >= self._patience

    def hear(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take in an evaluation's metrics.

        Raises:
            ValueError: the metric is not among them.
        """
        if self._metric not in metrics:
            raise ValueError(
                f"early stopping watches '{self._metric}', and the evaluation after step {step} "
                f"gave {', '.join(metrics) or 'nothing'}."
            )
        score = metrics[self._metric]
        if self._best is None or (
            score > self._best if self._mode == "max" else score < self._best
        ):
            self._best, self._num_worse = score, 0
            return
        self._num_worse += 1
        if self.is_due:
            logger.info(
                "step %d: training ends early: val/%s was no better than %.6g in %d evaluations in "
                "a row", step, self._metric, self._best, self._num_worse,
            )  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        """Return what `restore` takes."""
        return {"metric": self._metric, "best": self._best, "num_worse": self._num_worse}

    def restore(self, kept: Mapping[str, Any] | None) -> None:
        """Restore the state of a checkpoint, if it is for the same metric."""
        if kept is not None and kept["metric"] == self._metric:
            self._best, self._num_worse = kept["best"], kept["num_worse"]
