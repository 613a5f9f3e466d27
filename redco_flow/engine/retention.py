"""Which committed checkpoints to keep: pure, from their scores alone. Knows no files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from typing import Literal

Mode = Literal["max", "min"]
Scores = Mapping[int, Mapping[str, float | None]]


def best_step(scores: Scores, metric: str, mode: Mode) -> int | None:
    """Return the step with the best score, the earliest of equals; None where none has one."""
    sign = 1.0 if mode == "max" else -1.0
    scored = {}
    for step, metrics in scores.items():
        value = metrics.get(metric)
        if value is not None and math.isfinite(value):
            scored[step] = sign * value
    return max(scored, key=lambda step: (scored[step], -step)) if scored else None


def steps_to_delete(
    scores: Scores,
    *,
    keep_last: int,
    keep_best: Mapping[str, Mode],
    pinned: Set[int] = frozenset(),
) -> list[int]:
    """Return the steps that neither are among the last nor the best nor pinned, in order.

    Args:
        scores: the metrics of every committed step.
        keep_last: at least 1, so the newest always stays.
        keep_best: metric -> whether more or less is better.
    """
    kept = set(sorted(scores)[-keep_last:]) | set(pinned)
    for metric, mode in keep_best.items():
        best = best_step(scores, metric, mode)
        if best is not None:
            kept.add(best)
    return sorted(set(scores) - kept)
