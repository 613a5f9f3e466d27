"""Replace `${…}` in a document's texts by what it stands for.

`${env:NAME}`, `${env:NAME,default}`, `${profile.key}`, `${stages.NAME.outputs.OUTPUT}`, and
`${dotted.path}` of the same document; `$${` is a literal `${`. A text that is one reference and
nothing else takes the value's type. What an environment variable holds is never interpolated
again. Cycles, depth and size are limited, so that a few lines cannot fill the memory.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from redco_flow.errors import Problem
from redco_flow.spec.document import Document, Path, leaves
from redco_flow.spec.model import Scalar
from redco_flow.spec.scalars import control_problem, read_scalar
from redco_flow.spec.secrets import looks_secret_name
from redco_flow.spec.wording import dotted, nearest, shown

MAX_DEPTH = 32
MAX_CHARACTERS = 1 << 16
MAX_COPIED_VALUES = 20_000

_REFERENCE = re.compile(r"\$\$\{|\$\{([^{}]*)\}|\$\{")
_ENVIRONMENT = re.compile(r"env:([A-Za-z_][A-Za-z0-9_]*)(?:,(.*))?", re.DOTALL)
_OUTPUT = re.compile(r"stages\.(.+?)\.outputs\.(.+)")


@dataclass(frozen=True)
class Surroundings:
    """What a document's references may reach outside of it.

    Args:
        environ: the environment variables.
        profile: the profile's values; None where there is no profile.
        output_reference: gives the reference text for a stage's output, or raises ValueError.
    """

    environ: Mapping[str, str]
    profile: Mapping[str, Any] | None = None
    output_reference: Callable[[str, str], str] | None = None


def interpolate(document: Document, surroundings: Surroundings) -> tuple[Document, list[Problem]]:
    """Return the document with its references replaced, and the mistakes in them."""
    return _Interpolation(document, surroundings).run()


def escape(values: Any) -> Any:
    """Return values in which `interpolate` changes nothing."""
    if isinstance(values, str):
        return values.replace("${", "$${")
    if isinstance(values, dict):
        return {key: escape(value) for key, value in values.items()}
    if isinstance(values, list):
        return [escape(value) for value in values]
    return values


class _Bad(Exception):
    """A reference cannot be replaced; the message says why."""


@dataclass
class _Interpolation:
    """One pass over a document."""

    document: Document
    surroundings: Surroundings
    done: dict[Path, Any] = field(default_factory=dict)
    in_progress: list[Path] = field(default_factory=list)
    num_copied: int = 0
    problems: list[Problem] = field(default_factory=list)

    def run(self) -> tuple[Document, list[Problem]]:
        """Return the document with every text expanded; a text with a mistake stays as it is."""
        values = self._replaced((), self.document.values)
        return Document(values, self.document.origins), self.problems

    def _replaced(self, path: Path, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: self._replaced((*path, key), child) for key, child in value.items()}
        if isinstance(value, list):
            return [self._replaced((*path, index), child) for index, child in enumerate(value)]
        if not (isinstance(value, str) and "${" in value):
            return value
        try:
            return self._text_at(path, value)
        except _Bad as bad:
            problem = self.document.origin(path).problem(f"'{dotted(path)}': {bad}")
            self.problems.append(problem)
            return value

    def _text_at(self, path: Path, text: str) -> Any:
        if path in self.done:
            return self.done[path]
        if path in self.in_progress:
            cycle = [*self.in_progress[self.in_progress.index(path) :], path]
            raise _Bad("references go in a circle: " + " → ".join(map(dotted, cycle)))
        if len(self.in_progress) >= MAX_DEPTH:
            raise _Bad(f"references follow each other more than {MAX_DEPTH} times")
        self.in_progress.append(path)
        try:
            self.done[path] = self._expand(text)
        finally:
            self.in_progress.pop()
        return self.done[path]

    def _expand(self, text: str) -> Any:
        whole = _REFERENCE.fullmatch(text)
        if whole and whole.group(1) is not None:
            return self._value(whole.group(1))
        expanded = _REFERENCE.sub(self._part, text)
        if len(expanded) > MAX_CHARACTERS:
            raise _Bad(f"references make a text of more than {MAX_CHARACTERS:,} characters")
        return expanded

    def _part(self, found: re.Match[str]) -> str:
        if found.group() == "$${":
            return "${"
        if found.group(1) is None:
            raise _Bad("'${' without its '}'; write '$${' for the text '${'")
        value = self._value(found.group(1))
        if isinstance(value, dict | list):
            raise _Bad(f"{shown(found.group())} is no single value, so it cannot be part of a text")
        if isinstance(value, bool) or value is None:
            return {True: "true", False: "false", None: "null"}[value]
        return str(value)

    def _value(self, reference: str) -> Any:
        reference = reference.strip()
        if reference.startswith("env:"):
            return self._environment_value(reference)
        if output := _OUTPUT.fullmatch(reference):
            return self._output(output.group(1), output.group(2))
        if reference.startswith("profile."):
            return self._profile_value(reference.removeprefix("profile."))
        path = find_path(self.document.values, reference)
        if path is None:
            known = [dotted(leaf) for leaf in islice(leaves(self.document.values), 500)]
            raise _Bad(f"nothing is written at '{reference}'{nearest(reference, known)}")
        return self._copied(self._inside(path, self.document.get(path)))

    def _inside(self, path: Path, value: Any) -> Any:
        """Return a value of the document with the references inside it replaced."""
        if isinstance(value, str) and "${" in value:
            return self._text_at(path, value)
        if isinstance(value, dict):
            return {key: self._inside((*path, key), child) for key, child in value.items()}
        if isinstance(value, list):
            return [self._inside((*path, index), child) for index, child in enumerate(value)]
        return value

    def _copied(self, value: Any) -> Any:
        self.num_copied += _count(value)
        if self.num_copied > MAX_COPIED_VALUES:
            raise _Bad(f"references copy more than {MAX_COPIED_VALUES:,} values")
        return value

    def _environment_value(self, reference: str) -> Scalar:
        found = _ENVIRONMENT.fullmatch(reference)
        if found is None:
            raise _Bad("write ${env:NAME} or ${env:NAME,default}")
        name, default = found.groups()
        if looks_secret_name(name):
            raise _Bad(
                f"${{env:{name}}} would store a secret in the records; give the variable's name "
                f"to a key that ends in _env, or let the stage read the variable itself"
            )
        text = self.surroundings.environ.get(name, default)
        if text is None:
            raise _Bad(
                f"environment variable {name} is not set; set it, or write ${{env:{name},default}}"
            )
        if problem := control_problem(text):
            raise _Bad(f"environment variable {name}: {problem}")
        try:
            return read_scalar(text) if text else ""
        except ValueError:
            return text

    def _output(self, stage: str, output: str) -> str:
        if self.surroundings.output_reference is None:
            raise _Bad("stages can only be referred to in a pipeline")
        try:
            return self.surroundings.output_reference(stage, output)
        except ValueError as error:
            raise _Bad(str(error)) from error

    def _profile_value(self, key: str) -> Any:
        profile = self.surroundings.profile
        if profile is None:
            raise _Bad(f"${{profile.{key}}} needs a profile; give one with --profile")
        path = find_path(profile, key)
        if path is None:
            raise _Bad(f"the profile has no key '{key}'{nearest(key, profile)}")
        return self._copied(Document(profile).get(path))


def find_path(values: Any, text: str) -> Path | None:
    """Return the path that a dotted text means; keys may themselves contain dots."""
    if not isinstance(values, Mapping):
        return None
    if text in values:
        return (text,)
    for key, child in values.items():
        if text.startswith(f"{key}."):
            rest = find_path(child, text[len(key) + 1 :])
            if rest is not None:
                return (key, *rest)
    return None


def _count(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + sum(map(_count, value.values()))
    if isinstance(value, list):
        return 1 + sum(map(_count, value))
    return 1
