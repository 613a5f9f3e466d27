"""Differences of two runs' settings, with the file and line of each value.

Settings that determine results are separated from those of placement and speed by the ingredients
of the published results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from redco_flow.records import digest_json
from redco_flow.spec.document import leaves
from redco_flow.tracking.results import ABSENT, StageResult
from redco_flow.tracking.run_directory import RunDirectory
from redco_flow.tracking.typed_records import unless_damaged

_COMMAND_LINE = "command line"
_DESCRIPTIVE = ("name", "description", "tags")


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


@dataclass(frozen=True)
class SettingChanges:
    """Settings that differ.

    Args:
        determining: part of the stages' fingerprints.
        placing: of placement, speed or description of the pipeline.
    """

    determining: tuple[Change, ...] = ()
    placing: tuple[Change, ...] = ()


def setting_changes(
    first: RunDirectory, second: RunDirectory, results: Mapping[str, Sequence[StageResult]]
) -> SettingChanges:
    """Return the differences of two runs' resolved.yaml.

    Args:
        results: of either run, by stage; a stage without one is listed too.

    Raises:
        OSError: a run has no resolved.yaml.
        ConfigError: resolved.yaml was changed by hand and cannot be read.
    """
    if first.resolved_path.read_bytes() == second.resolved_path.read_bytes():
        return SettingChanges()
    places = _Places.read(first), _Places.read(second)
    changes = [
        Change(key, old, new, places[0].find(key), places[1].find(key))
        for key, old, new in changed_keys(read_settings(first), read_settings(second))
    ]
    known = {stage: _Ingredients.of(found) for stage, found in results.items()}
    determining = tuple(one for one in changes if _determines(one.key, known))
    return SettingChanges(determining, tuple(one for one in changes if one not in determining))


def read_settings(run: RunDirectory) -> dict[str, Any]:
    """Return every setting of a run by its dotted key.

    Raises:
        OSError: the run has no resolved.yaml.
        ConfigError: resolved.yaml was changed by hand and cannot be read.
    """
    # Imported here: most pairs of runs have equal settings, and it brings pydantic.
    from redco_flow.spec.yaml import read_yaml

    path = run.resolved_path
    document = read_yaml(path.read_text(encoding="utf-8"), str(path))
    return flatten(document.values)


def flatten(values: Any) -> dict[str, Any]:
    """Return the leaves of nested mappings by dotted key; lists are leaves."""
    return {".".join(map(str, path)): _at(values, path) for path in leaves(values) if path}


def _at(values: Any, path: Sequence[Any]) -> Any:
    for key in path:
        values = values[key]
    return values


@dataclass(frozen=True)
class _Places:
    """The places in which a run's settings are written."""

    origins: Mapping[str, Any]
    overrides: Sequence[str]

    @classmethod
    def read(cls, run: RunDirectory) -> _Places:
        return cls(unless_damaged(run.read_origins) or {}, run.record.get("overrides") or [])

    def find(self, key: str) -> str:
        """`file:line`, `command line: key=value` or "default"; empty where none is known."""
        for around in _and_around(key):
            if (origin := self.origins.get(around)) is not None:
                return self._shown(key, origin)
        return ""

    def _shown(self, key: str, origin: Mapping[str, Any]) -> str:
        if origin["source"] == _COMMAND_LINE:
            override = self._override(key)
            return f"{_COMMAND_LINE}: {override}" if override else _COMMAND_LINE
        return f"{origin['source']}:{origin['line']}" if origin["line"] else str(origin["source"])

    def _override(self, key: str) -> str:
        """The last `key=value` that means this setting or one around it."""
        for text in reversed(self.overrides):
            given = text.partition("=")[0].lstrip("~")
            if any(one == given or one.endswith(f".{given}") for one in _and_around(key)):
                return text
        return ""


def _and_around(key: str) -> list[str]:
    """A dotted key and the keys of what is around it, innermost first."""
    words = key.split(".")
    return [".".join(words[:count]) for count in range(len(words), 0, -1)]


@dataclass(frozen=True)
class _Ingredients:
    """The ingredients of a stage's fingerprint, by the keys of the pipeline file.

    Args:
        leaves: keys of values; none where the stage has no result.
        around: keys of the mappings that contain the values.
    """

    leaves: frozenset[str]
    around: frozenset[str]

    @classmethod
    def of(cls, results: Sequence[StageResult]) -> _Ingredients:
        """Collect the keys of both runs' results."""
        keys: set[str] = set()
        for result in results:
            moved = map(".".join, result.ingredients.get("directories", ()))
            keys.update(flatten(result.ingredients.get("settings", {})).keys() - set(moved))
            keys.update(("kind", *result.ingredients.get("inputs", {})))
        around = frozenset(one for key in keys for one in _and_around(key)[1:])
        return cls(frozenset(keys), around)

    def have(self, key: str) -> bool:
        """Whether a setting is among them, or part of a value that is."""
        is_value = any(one in self.leaves for one in _and_around(key))
        return not self.leaves or is_value or key in self.around


def _determines(key: str, known: Mapping[str, _Ingredients]) -> bool:
    """Whether a setting is part of fingerprints; an unknown one counts as part of them."""
    section, _, rest = key.partition(".")
    if section in _DESCRIPTIVE:
        return False
    if section != "stages":
        return not known or any(stage.have(key) for stage in known.values())
    stage_name, _, own = rest.partition(".")
    if own.partition(".")[0] == "resources":
        return False
    return stage_name not in known or known[stage_name].have(own)
