"""Compare the settings of a training with those of the checkpoint whose optimizer it continues.

Plans import it on login nodes, so it imports no JAX.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from redco_flow.spec.stage_kind import StageConfig

OPTIMIZER_STATE = "optimizer_state"
"""The key of a checkpoint's metadata with the settings that its optimizer state depends on."""

_KEYS = ("recipe", "optimizer", "mu_dtype", "param_dtype", "frozen_dtype", "freeze")


def optimizer_state_settings(config: StageConfig) -> dict[str, Any]:
    """Return a train stage's settings that are equal where an optimizer's state is continued."""
    return {key: getattr(config, key) for key in _KEYS}


def continuation_problems(config: StageConfig, saved: Mapping[str, Any] | None) -> Iterator[str]:
    """Yield why a training cannot continue the optimizer of a checkpoint.

    Args:
        saved: the checkpoint's `optimizer_state_settings`; None where it has no such state.
    """
    if saved is None:
        yield (
            "the checkpoint has no recorded optimizer state: it is of low-rank factors, of "
            "`keep: {optimizer: last}` and not the last one, or of an earlier version. Leave "
            "`optimizer: true` out to begin with its parameters alone, or choose another checkpoint"
        )
        return
    for key, value in optimizer_state_settings(config).items():
        if saved.get(key) != value:
            yield (
                f"`optimizer: true` continues a training with {key} {_shown(saved.get(key))}, and "
                f"here it is {_shown(value)}: give both the same {key}, or leave `optimizer: true` "
                "out to begin with the parameters alone"
            )


def _shown(value: object) -> str:
    return "null" if value is None else str(value)
