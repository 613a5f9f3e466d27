"""What steps without a finite loss or gradient come to: they end a training, or are counted.

Whether such a step changed anything was decided where it ran; this hears of it some steps later.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections import deque
from collections.abc import Mapping
from typing import Any

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

    def hear(self, step: int, seconds: float) -> bool:
        """Take in a step's time; return whether it was slow, and was warned of."""
        is_slow = False
        if self._factor is not None and len(self._seconds) >= _MIN_STEPS:
            median = statistics.median(self._seconds)
            is_slow = seconds > self._factor * median
            if is_slow:
                logger.warning(
                    "step %d took %.3g s, %.1f times the median of %.3g s; look at this host's "
                    "load, its data source and the other hosts", step, seconds,
                    seconds / median, median,
                )  # fmt: skip
        self._seconds.append(seconds)
        return is_slow
