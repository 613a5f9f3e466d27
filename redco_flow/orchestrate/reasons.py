"""Say in a few words why a stage has to run: the first ingredient that differs from last time.

Compares with the result of the same stage that was published last. Reads results only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from redco_flow.hub import is_commit
from redco_flow.spec.load import Origin, ResolvedPipeline
from redco_flow.tracking.artifacts import ArtifactStore
from redco_flow.tracking.fingerprint import ABSENT, Difference, differences
from redco_flow.tracking.results import (
    StageResult,
    faults_of,
    find_damage,
    latest_result,
    read_result,
)
from redco_flow.tracking.workspace import Workspace

_MAX_VALUE_CHARACTERS = 60
_SHORT_COMMIT = 12


def reason_to_run(
    resolved: ResolvedPipeline,
    stage: str,
    ingredients: Mapping[str, Any],
    fingerprint: str,
    workspace: Workspace,
) -> str:
    """Return why `stage` runs, given that its fingerprint has no usable result."""
    if (standing := read_result(workspace, fingerprint)) is not None:
        return _why_not_reused(workspace, standing)
    if find_damage(workspace, fingerprint) is not None:
        return "its result's record is damaged"
    last = latest_result(workspace, resolved.name, stage)
    if last is None:
        return "first run"
    found = list(differences(last.ingredients, ingredients))
    if not found:
        return "first run"
    # The first one explains the rest, except for what moved on the hub: that was not changed here.
    told = [found[0], *(one for one in found[1:] if _is_move(one))]
    return "; ".join(describe(one, stage, resolved.origins) for one in told)


def _why_not_reused(workspace: Workspace, result: StageResult) -> str:
    store = ArtifactStore(workspace)
    if not all(map(store.is_whole, result.outputs.values())):
        return "artifact missing"
    faults = faults_of(workspace, result)
    return f"damaged: {faults[0]}" if faults else "artifact missing"


def describe(difference: Difference, stage: str, origins: Mapping[str, Origin]) -> str:
    """Return a difference for people, with the place in the file for a setting."""
    section, _, key = difference.key.partition(".")
    if section == "code":
        verb = {True: "is gone", False: "changed"}[difference.new == ABSENT]
        return f"code {key} {'is new' if difference.old == ABSENT else verb}"
    if section in ("data", "inputs"):
        what = "data" if section == "data" else "input"
        return f"{what} {key} changed" if key else f"{what} changed"
    change = f"{_shown(difference.old)} → {_shown(difference.new)}"
    place = _place(key, stage, origins)
    return f"{key or section}: {change}" + (f" ({place})" if place else "")


def _is_move(difference: Difference) -> bool:
    """Whether a revision on the hub has become another commit."""
    return difference.key.startswith("settings.") and all(
        isinstance(value, str) and is_commit(value) for value in (difference.old, difference.new)
    )


def _place(key: str, stage: str, origins: Mapping[str, Origin]) -> str:
    """Where the setting was said: file:line, "command line" or "default"."""
    for candidate in _origin_keys(key, stage):
        origin = origins.get(candidate)
        if origin is not None:
            return f"{origin.source}:{origin.line}" if origin.line else origin.source
    return ""


def _origin_keys(key: str, stage: str) -> Iterator[str]:
    """The setting itself and, as a list or mapping may have been said whole, what holds it."""
    words = key.split(".")
    for count in range(len(words), 0, -1):
        path = ".".join(words[:count])
        yield f"stages.{stage}.{path}"
        yield path


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    text = str(value)
    if is_commit(text):
        return text[:_SHORT_COMMIT]
    return text if len(text) <= _MAX_VALUE_CHARACTERS else f"{text[:_MAX_VALUE_CHARACTERS]}…"
