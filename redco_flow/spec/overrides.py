"""Lay `key=value` and `~key` from the command line over a document.

A key is a whole dotted path, or its end where only one setting ends so, or where all that do mean
the same in their stages (`seed`): then all of them are set. A value that begins with a quote, `[`
or `{` is read as YAML; any other value is one plain scalar, taken literally, so that
`source_prefix=summarize: ` needs no quotes of its own.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from redco_flow.errors import Problem
from redco_flow.spec.document import COMMAND_LINE, Document, written_at
from redco_flow.spec.names import nearest, shown
from redco_flow.spec.other_names import own_name
from redco_flow.spec.problems import similar_keys, unknown_key
from redco_flow.spec.yaml import control_problem, parse_yaml, read_scalar

PROFILE_PREFIX = "profile."

TextPath = tuple[str, ...]


@dataclass(frozen=True)
class Override:
    """One change: a key with its value, or a key to delete."""

    key: str
    value: Any = None
    is_deletion: bool = False


@dataclass
class KeySpace:
    """The settings that an override may mean.

    Args:
        settings: paths that a bare key may stand for.
        hidden: paths that are meant only where no setting matches: a stage's own copy of a
            section of the pipeline, the keys of a reference with options, and a section's key that
            the stage has, too.
        open_paths: below these any key may be set.
        meanings: what a stage's setting means: settings with equal meanings may be set by one key.
    """

    settings: set[TextPath] = field(default_factory=set)
    hidden: set[TextPath] = field(default_factory=set)
    open_paths: set[TextPath] = field(default_factory=set)
    meanings: dict[TextPath, Hashable] = field(default_factory=dict)

    def find(self, key: str) -> list[TextPath]:
        """Return the paths that `key` means: one, or one in each stage where they mean the same.

        Raises:
            ValueError: it means none, or several different ones; the message lists them.
        """
        for paths in (self.settings, self.hidden):
            exact = {path for path in paths if ".".join(path) == key}
            exact |= {path for path in self._below_open(key, paths) if ".".join(path) == key}
            if exact:
                return sorted(exact)
        for paths in (self.settings, self.hidden):
            found = {path for path in paths if ".".join(path).endswith(f".{key}")}
            found |= self._below_open(key, paths)
            if len(found) > 1 and not self._mean_the_same(found):
                raise ValueError(
                    f"'{key}' stands for several settings; write one of: "
                    f"{', '.join(sorted(map('.'.join, found)))}"
                )
            if found:
                return sorted(found)
        raise ValueError(self._unknown(key))

    def _mean_the_same(self, paths: set[TextPath]) -> bool:
        meanings = {self.meanings.get(path, path) for path in paths}
        return len(meanings) == 1

    def _below_open(self, key: str, paths: set[TextPath]) -> set[TextPath]:
        """Paths below `model.config` for `model.config.d_model` or `config.d_model`."""
        found = set()
        for path in self.open_paths & paths:
            for start in range(len(path)):
                beginning = ".".join(path[start:]) + "."
                if key.startswith(beginning) and len(key) > len(beginning):
                    found.add((*path, *key[len(beginning) :].split(".")))
        return found

    def _unknown(self, key: str) -> str:
        """Say that there is no such key, in the words of the section that it seems to mean."""
        section, _, name = key.rpartition(".")
        everything = self.settings | self.hidden
        owners = [
            path
            for path in everything
            if f".{'.'.join(path)}".endswith(f".{section}") and _children(path, everything)
        ]
        if section and owners:
            owner = min(owners, key=lambda path: (len(path), path))
            return unknown_key(owner, name, _children(owner, everything))
        if own := own_name(key, (), ()):
            return f"there is no setting {shown(key)}: {own}."
        names = {path[-1] for path in self.settings} | {".".join(path) for path in self.settings}
        last = {path[-1] for path in self.settings}
        return f"there is no setting {shown(key)}{nearest(key, names)} {similar_keys(key, last)}"


def for_profile(overrides: Iterable[str]) -> list[str]:
    """Return the overrides that go to the profile, without their `profile.`."""
    return [text.replace(PROFILE_PREFIX, "", 1) for text in overrides if _is_for_profile(text)]


def for_pipeline(overrides: Iterable[str]) -> list[str]:
    """Return the overrides that go to the pipeline."""
    return [text for text in overrides if not _is_for_profile(text)]


def read_override(text: str) -> tuple[Override | None, list[Problem]]:
    """Read `key=value` or `~key`; None with the reasons where it is neither."""
    key, equals, value = text.partition("=")
    key = key.strip()
    if problem := control_problem(text):
        return None, [COMMAND_LINE.problem(problem)]
    if key.startswith("~") and not equals and len(key) > 1:
        return Override(key[1:], is_deletion=True), []
    if not equals or not key or key.startswith("~"):
        message = f"{shown(text)} is neither key=value nor ~key (which deletes a key)"
        return None, [COMMAND_LINE.problem(message)]
    stripped = value.strip()
    if stripped[:1] in ("'", '"', "[", "{"):
        document, problems = parse_yaml(stripped, COMMAND_LINE.source)
        if problems:
            reasons = "; ".join(problem.message for problem in problems)
            return None, [COMMAND_LINE.problem(f"the value of {shown(key)}: {reasons}")]
        return Override(key, document.values), []
    try:
        scalar = read_scalar(stripped)
    except ValueError as error:
        return None, [COMMAND_LINE.problem(f"the value of {shown(key)}: {error}")]
    # An empty value is empty text, as in Hydra; `key=null` unsets.
    is_text = isinstance(scalar, str) or not stripped
    return Override(key, value if is_text else scalar), []


def apply_override(document: Document, override: Override, path: Sequence[str]) -> Document:
    """Return the document with one override laid over it; a mapping replaces, never merges."""
    if override.is_deletion:
        return document.without(tuple(path))
    return document.with_part(tuple(path), written_at(override.value, COMMAND_LINE))


def _children(path: TextPath, paths: set[TextPath]) -> set[str]:
    return {other[-1] for other in paths if other[:-1] == path}


def _is_for_profile(text: str) -> bool:
    return text.lstrip("~").startswith(PROFILE_PREFIX)
