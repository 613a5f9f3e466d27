"""Correlation of predicted and true numbers, which `pearson` and `spearman` are made of."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real

from redco_flow.spec.metric import check_pairs


def number_pairs(
    predictions: Sequence[float], references: Sequence[Sequence[float]]
) -> tuple[list[float], list[float]]:
    """Return the predicted and the true numbers, which are the first references.

    Raises:
        ValueError: one of them is no number.
    """
    check_pairs(predictions, references)
    true = [values[0] for values in references]
    for what, values in (("reference", true), ("prediction", predictions)):
        for index, value in enumerate(values):
            if not isinstance(value, Real) or not math.isfinite(value):
                raise ValueError(f"the {what} of example {index} is no number: {value!r}.")
    return list(map(float, predictions)), list(map(float, true))


def correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Return Pearson's correlation, -1 to 1; 0 where either are all the same."""
    first, second = _centred(first), _centred(second)
    covariance = math.fsum(one * other for one, other in zip(first, second, strict=True))
    spread = math.sqrt(math.fsum(one**2 for one in first) * math.fsum(one**2 for one in second))
    return covariance / spread if spread else 0.0


def ranks(values: Sequence[float]) -> list[float]:
    """Return each value's rank from 1; equal values share the mean of theirs."""
    order = sorted(range(len(values)), key=values.__getitem__)
    found = [0.0] * len(values)
    start = 0
    while start < len(order):
        end = start
        while end < len(order) and values[order[end]] == values[order[start]]:
            end += 1
        for index in order[start:end]:
            found[index] = (start + 1 + end) / 2
        start = end
    return found


def _centred(values: Sequence[float]) -> list[float]:
    if min(values) == max(values):
        return [0.0] * len(values)  # a mean may differ from equal values by its rounding
    mean = math.fsum(values) / len(values)
    return [value - mean for value in values]
