"""Learning rates as functions of the optimizer step, counted from 0.

All but `constant` rise from 0 during the warm-up, as those of transformers do. Traceable: they
are computed inside the train step. Refuses to know optimizers and accumulation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

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
    after = _after_warmup(type, total_steps, warmup_steps, decay_fraction)

    def schedule(step: Any) -> Any:
        count = jnp.asarray(step, jnp.float32)
        factor = jnp.maximum(after(count), 0.0)
        if warmup_steps:
            factor = jnp.where(count < warmup_steps, count / warmup_steps, factor)
        return peak * factor

    return schedule


def _after_warmup(
    type: str, total_steps: int, warmup_steps: int, decay_fraction: float
) -> Callable[[Any], Any]:
    """Return the factor on the peak, from 1 on, for steps past the warm-up."""
    falling_steps = max(total_steps - warmup_steps, 1)
    if type == "constant":
        return jnp.ones_like
    if type == "linear":
        return lambda count: (total_steps - count) / falling_steps
    if type == "cosine":
        return lambda count: (
            0.5 * (1 + jnp.cos(jnp.pi * jnp.clip((count - warmup_steps) / falling_steps, 0, 1)))
        )
    if type == "inverse_sqrt":
        first = max(warmup_steps, 1)
        return lambda count: jnp.sqrt(first / jnp.maximum(count, first))
    decay_steps = max(min(round(total_steps * decay_fraction), falling_steps), 1)
    return lambda count: jnp.minimum((total_steps - count) / decay_steps, 1.0)
