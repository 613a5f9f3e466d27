"""Where an axis begins and ends, where its ticks stand, and where a value lies on it.

Linear or logarithmic; ticks are round numbers (1, 2 or 5 times a power of ten). Knows nothing of
how an axis is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from redco_flow.report.number_format import number

_LOG_FROM_RATIO = 10.0  # from here on a linear axis flattens the small values into one line
_MARGIN = 0.04
_SMALLEST_PLAIN_STEP, _LARGEST_PLAIN_STEP = 1e-3, 1e6  # beyond, ticks are told as powers of ten


@dataclass(frozen=True)
class Axis:
    """One axis.

    Args:
        low, high: values at its ends; positive if it is logarithmic.
        ticks: values within, ascending.
        labels: their texts.
        is_log: whether equal distances are equal ratios.
    """

    low: float
    high: float
    ticks: tuple[float, ...]
    labels: tuple[str, ...]
    is_log: bool = False

    def fraction(self, value: float) -> float:
        """Return where a value lies, from 0 at the low end to 1 at the high end."""
        if self.is_log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def make_axis(
    values: Iterable[float],
    *,
    num_ticks: int = 5,
    from_zero: bool = False,
    may_be_log: bool = False,
    is_tight: bool = False,
    are_counts: bool = False,
) -> Axis:
    """Return an axis that holds all the values.

    Args:
        values: finite.
        num_ticks: about how many.
        from_zero: begin at 0 where no value is below.
        may_be_log: be logarithmic if all values are positive and the largest is at least 10
            times the smallest.
        is_tight: end at the extreme values, without a margin.
        are_counts: put ticks at whole numbers only.
    """
    found = list(values) or [0.0, 1.0]
    low, high = min(found), max(found)
    if may_be_log and low > 0 and high / low >= _LOG_FROM_RATIO:
        return _log_axis(low, high)
    if from_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if low == high == 0:
        low, high = 0.0, 1.0
    elif low == high:
        low, high = low - abs(low) * 0.1, high + abs(high) * 0.1
    elif not is_tight:
        margin = (high - low) * _MARGIN
        low = low if from_zero and low == 0 else low - margin
        high += margin
    step = _round_step((high - low) / num_ticks)
    if are_counts:
        step = max(1.0, step)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    ticks = tuple(index * step for index in range(first, last + 1))
    return Axis(low, high, ticks, tuple(_tick_text(tick, step) for tick in ticks))


def _log_axis(low: float, high: float) -> Axis:
    low, high = low / 1.15, high * 1.15
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1, 2, 5) if high / low <= 1e3 else (1,)
    every = max(1, math.ceil(len(decades) / 8))
    ticks = tuple(
        factor * 10.0**decade
        for decade in decades[::every]
        for factor in factors
        if low <= factor * 10.0**decade <= high
    )
    return Axis(low, high, ticks, tuple(_plain(tick) for tick in ticks), is_log=True)


def _round_step(rough: float) -> float:
    """The nearest of 1, 2 and 5 times a power of ten that is not smaller."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)


def _tick_text(tick: float, step: float) -> str:
    """All ticks of an axis with the same number of decimals."""
    if tick == 0 or abs(tick) < step / 2:
        return "0"
    if not _SMALLEST_PLAIN_STEP <= step < _LARGEST_PLAIN_STEP:
        return number(float(f"{tick:.6g}"))
    if step >= 1000:
        return f"{tick / 1000:,.0f}k"
    decimals = max(0, -math.floor(math.log10(step)))
    return f"{tick:,.{decimals}f}"


def _plain(tick: float) -> str:
    if tick >= 1:
        return f"{tick:,.0f}"
    return f"{tick:g}" if tick >= 1e-3 else number(float(f"{tick:.6g}"))
