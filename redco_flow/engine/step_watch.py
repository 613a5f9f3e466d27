"""Notice a step that takes much longer than the ones before it.

Is told times that are measured anyway, so no device is waited for. Knows no clock.
"""

from __future__ import annotations

import logging
import statistics
from collections import deque

logger = logging.getLogger(__name__)

# Before there are so many, there is nothing to compare with.
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
