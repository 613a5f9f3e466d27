"""Learning rate schedules by name, made of optax's: functions of the optimizer step, from 0."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import optax

Schedule = Callable[[Any], Any]

SCHEDULE_TYPES = ("linear", "cosine", "constant", "inverse_sqrt", "wsd")


def make_schedule(
    type: str,
    peak: float,
    total_steps: int,
    warmup_steps: int = 0,
    *,
    decay_fraction: float = 0.2,
) -> Schedule:
    """Return the function from optimizer step to learning rate.

    Args:
        type: `linear` falls to 0 at total_steps; `cosine` too, along half a cosine; `constant`
            stays at the peak after the warm-up; `inverse_sqrt` falls with the square root of the
            step; `wsd` (warm-up, stable, decay) stays at the peak and falls linearly to 0 in the
            last steps.
        peak: the highest rate.
        total_steps: optimizer steps of the whole training.
        warmup_steps: steps of linear rise from 0.
        decay_fraction: for `wsd`, the share of total_steps in which the rate falls.

    Raises:
        ValueError: an unknown type, or numbers out of range.
    """
    if type not in SCHEDULE_TYPES:
        raise ValueError(
            f"schedule type {type!r} is unknown; allowed: {', '.join(SCHEDULE_TYPES)}."
        )
    if not peak >= 0:
        raise ValueError(f"the peak learning rate {peak} must not be negative.")
    if total_steps < 1 or not 0 <= warmup_steps <= total_steps:
        raise ValueError(
            f"warmup_steps={warmup_steps} must be in 0..total_steps, and "
            f"total_steps={total_steps} at least 1."
        )
    if not 0 < decay_fraction <= 1:
        raise ValueError(f"decay_fraction={decay_fraction} must be above 0 and at most 1.")
    after = _after_warmup(type, peak, total_steps, warmup_steps, decay_fraction)
    if not warmup_steps:
        return after
    rise = optax.linear_schedule(0.0, peak, warmup_steps)
    schedule: Schedule = optax.join_schedules([rise, after], [warmup_steps])
    return schedule


def _after_warmup(
    type: str, peak: float, total_steps: int, warmup_steps: int, decay_fraction: float
) -> Schedule:
    """Return the rate as a function of the steps since the warm-up."""
    falling_steps = max(total_steps - warmup_steps, 1)
    after: Schedule
    if type == "constant":
        after = optax.constant_schedule(peak)
    elif type == "linear":
        after = optax.linear_schedule(peak, 0.0, falling_steps)
    elif type == "cosine":
        after = optax.cosine_decay_schedule(peak, falling_steps)
    elif type == "wsd":
        decay_steps = max(min(round(total_steps * decay_fraction), falling_steps), 1)
        after = optax.linear_schedule(peak, 0.0, decay_steps, falling_steps - decay_steps)
    else:  # optax has no inverse square root
        first = max(warmup_steps, 1)
        after = lambda count: peak * jnp.sqrt(first / jnp.maximum(count + warmup_steps, first))  # noqa: E731
    return after
