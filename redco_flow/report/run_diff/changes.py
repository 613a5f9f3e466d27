"""Compare two runs key by key: settings, digests, versions, of the run and of common stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from redco_flow.records import digest_json
from redco_flow.tracking.results import ABSENT


@dataclass(frozen=True)
class Change:
    """A key whose values differ in two runs.

    Args:
        key: a setting's dotted key, a file's, module's or package's name.
        first: its value in the first run, anything JSON; ABSENT where the run has none.
        second: its value in the second run.
        first_place: the place of the first value: `file:line`, the command line's `key=value`,
            "default"; empty where it is not known.
        second_place: of the second value.
        stages: the stages that have it so; empty where it is the whole run's.
    """

    key: str
    first: Any
    second: Any
    first_place: str = ""
    second_place: str = ""
    stages: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return it as one JSON value."""
        return asdict(self)


def changed_keys(
    first: Mapping[str, Any], second: Mapping[str, Any]
) -> Iterator[tuple[str, Any, Any]]:
    """Yield each key whose values differ, with both of them, in the second run's order.

    Values are compared as fingerprints compare them: 1, 1.0 and true are three values.
    """
    for key in (*second, *(key for key in first if key not in second)):
        old, new = first.get(key, ABSENT), second.get(key, ABSENT)
        if old is not new and _digest(old) != _digest(new):
            yield key, old, new


def changes_by_stage(
    first: Mapping[str, Mapping[str, Any]], second: Mapping[str, Mapping[str, Any]]
) -> list[Change]:
    """Return the differences of the stages that both runs have; equal changes of stages are one.

    Args:
        first: of each stage, value by key.
        second: likewise.
    """
    found: dict[str, tuple[str, Any, Any, list[str]]] = {}
    for stage in (name for name in second if name in first):
        for key, old, new in changed_keys(first[stage], second[stage]):
            identity = f"{key} {_digest(old)} {_digest(new)}"
            found.setdefault(identity, (key, old, new, []))[3].append(stage)
    return [Change(key, old, new, stages=tuple(names)) for key, old, new, names in found.values()]


def collect(
    stages: Mapping[str, Any], read: Callable[[Any], Mapping[str, Any] | None]
) -> dict[str, Mapping[str, Any]]:
    """Return the result of `read` for each stage; stages with None are left out."""
    found = {name: read(stage) for name, stage in stages.items()}
    return {name: values for name, values in found.items() if values is not None}


def _digest(value: Any) -> str:
    try:
        return digest_json(value)
    except ValueError:  # a NaN, which no fingerprint holds
        return repr(value)
