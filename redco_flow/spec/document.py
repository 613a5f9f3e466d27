"""A tree of plain values in which every key and item knows where it was written.

Layers (profile, file, command line) are documents that are merged; the origin of each leaf
survives merging. Knows nothing of YAML and nothing of what the keys mean.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from redco_flow.errors import Problem

KeyPath = tuple[str | int, ...]


@dataclass(frozen=True)
class Origin:
    """The origin of a value: a file with line and column, "default", or "command line"."""

    source: str
    line: int = 0
    column: int = 0

    def problem(self, message: str, *, is_of_machine: bool = False) -> Problem:
        """Return the mistake that `message` describes, at this place."""
        return Problem(self.source, self.line, self.column, message, is_of_machine)


DEFAULT = Origin("default")
COMMAND_LINE = Origin("command line")


@dataclass(frozen=True)
class Document:
    """Plain values (dict, list, str, int, float, bool, None) and their origins; never changed.

    Args:
        origins: by path; the root's is at (). A path without one has its parent's.
    """

    values: Any
    origins: Mapping[KeyPath, Origin] = field(default_factory=dict)

    def origin(self, path: KeyPath) -> Origin:
        """Return where `path`, or its nearest written ancestor, was written."""
        for length in range(len(path), -1, -1):
            if path[:length] in self.origins:
                return self.origins[path[:length]]
        return DEFAULT

    def leaf_origin(self, path: KeyPath) -> Origin:
        """Return where a resolved leaf comes from; DEFAULT where none was written."""
        value = self.values
        for index, part in enumerate(path):
            if not isinstance(value, dict):
                return self.origin(path[:index])
            if part not in value:
                return DEFAULT
            value = value[part]
        return self.origin(path)

    def get(self, path: KeyPath, missing: Any = None) -> Any:
        """Return the value at `path`, or `missing`."""
        value = self.values
        for part in path:
            if not is_inside(value, part):
                return missing
            value = value[part]
        return value

    def has(self, path: KeyPath) -> bool:
        """Tell whether something is written at `path`."""
        return _is_written(self.values, path)

    def section(self, path: KeyPath) -> Document:
        """Return the part below `path` as a document of its own."""
        origins = {key[len(path) :]: o for key, o in self.origins.items() if _below(key, path)}
        origins.setdefault((), self.origin(path))
        return Document(self.get(path), origins)

    def merged(self, upper: Document) -> Document:
        """Return this layer with `upper` laid over it: mappings merge, all else is replaced."""
        origins = {
            path: upper.origin(path) if _is_written(upper.values, path) else origin
            for path, origin in self.origins.items()
            if not _is_replaced(upper.values, path)
        }
        return Document(_merged(self.values, upper.values), {**origins, **upper.origins})

    def with_part(self, path: KeyPath, part: Document) -> Document:
        """Return this document with everything at `path` replaced by `part`."""
        bare = self.without(path)
        origins = dict(bare.origins)
        for length in range(1, len(path)):
            origins.setdefault(path[:length], part.origin(()))
        origins.update({path + key: origin for key, origin in part.origins.items()})
        return Document(_replaced(bare.values, path, part.values), origins)

    def without(self, path: KeyPath) -> Document:
        """Return this document without `path`."""
        kept = {key: origin for key, origin in self.origins.items() if not _below(key, path)}
        return Document(_removed(self.values, path), kept)


def written_at(values: Any, origin: Origin) -> Document:
    """Return values that were all written at one place."""
    return Document(values, dict.fromkeys(_nodes(values), origin))


def is_inside(value: Any, part: str | int) -> bool:
    """Tell whether `value[part]` exists."""
    if isinstance(value, dict):
        return part in value
    return isinstance(value, list) and isinstance(part, int) and 0 <= part < len(value)


def leaves(values: Any, path: KeyPath = ()) -> Iterator[KeyPath]:
    """Yield the path of each leaf: whatever is no mapping, or an empty one; lists are leaves."""
    if isinstance(values, dict) and values:
        for key, value in values.items():
            yield from leaves(value, (*path, key))
    else:
        yield path


def _nodes(values: Any, path: KeyPath = ()) -> Iterator[KeyPath]:
    yield path
    if isinstance(values, dict):
        for key, value in values.items():
            yield from _nodes(value, (*path, key))
    elif isinstance(values, list):
        for index, value in enumerate(values):
            yield from _nodes(value, (*path, index))


def _below(path: KeyPath, ancestor: KeyPath) -> bool:
    return path[: len(ancestor)] == ancestor


def _merged(lower: Any, upper: Any) -> Any:
    if not (isinstance(lower, dict) and isinstance(upper, dict)):
        return upper
    merged = {key: _merged(lower[key], upper[key]) for key in lower if key in upper}
    return {**lower, **upper, **merged}


def _is_written(values: Any, path: KeyPath) -> bool:
    for part in path:
        if not is_inside(values, part):
            return False
        values = values[part]
    return True


def _is_replaced(values: Any, path: KeyPath) -> bool:
    """Tell whether something at or above the path is written as no mapping."""
    for part in path:
        if not isinstance(values, dict):
            return True
        if part not in values:
            return False
        values = values[part]
    return False


def _replaced(values: Any, path: KeyPath, value: Any) -> Any:
    if not path:
        return value
    inner = values if isinstance(values, dict) else {}
    return {**inner, path[0]: _replaced(inner.get(path[0]), path[1:], value)}


def _removed(values: Any, path: KeyPath) -> Any:
    if not isinstance(values, dict) or not path or path[0] not in values:
        return values
    if len(path) == 1:
        return {key: value for key, value in values.items() if key != path[0]}
    return {**values, path[0]: _removed(values[path[0]], path[1:])}
