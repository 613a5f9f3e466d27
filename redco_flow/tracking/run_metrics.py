"""The metrics of a run's stages by the names that people use: `rougeL`, or `train/rougeL`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def locate_metrics(stages: Mapping[str, Mapping[str, Any]]) -> dict[str, tuple[str, str]]:
    """Return the stage and the key behind each metric's name, as `why` takes the names.

    A name that several stages report is the scoring stage's (the one that made a metrics
    artifact); the others' get their stage before it, and so do all where two stages score.

    Args:
        stages: the entries of state.json.
    """
    by_stage = {name: stage["metrics"] for name, stage in stages.items() if stage.get("metrics")}
    named: dict[str, tuple[str, str]] = {}
    for stage, metrics in by_stage.items():
        for key in metrics:
            reporting = [one for one, found in by_stage.items() if key in found]
            scoring = [one for one in reporting if "metrics" in stages[one].get("artifacts", {})]
            is_plain = (scoring or reporting) == [stage]
            named[key if is_plain else f"{stage}/{key}"] = (stage, key)
    return named


def read_metrics(stages: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Return the value of each metric of a run's stages (`locate_metrics` names them)."""
    located = locate_metrics(stages)
    return {name: stages[stage]["metrics"][key] for name, (stage, key) in located.items()}
