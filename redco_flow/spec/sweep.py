"""Which points a sweep has: every combination of the values that its settings take.

`KEY=V1,V2` names a setting and its values; each of them is what an override `KEY=V` may have.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence

from redco_flow.errors import ConfigError, Problem
from redco_flow.spec.document import COMMAND_LINE
from redco_flow.spec.overrides import read_override
from redco_flow.spec.wording import shown

_CLOSING = {"[": "]", "{": "}", "'": "'", '"': '"'}

Point = tuple[str, ...]
"""One point's overrides, `key=value` each, in the order of the settings."""


def read_points(texts: Sequence[str]) -> list[Point]:
    """Return the grid over the given settings; the last one changes fastest.

    Args:
        texts: `KEY=V1,V2,…` each; commas within quotes and brackets belong to a value.

    Raises:
        ConfigError: every text that is no setting with different values.
    """
    problems: list[Problem] = []
    axes = []
    for text in texts:
        key, _, values = text.partition("=")
        axis = [f"{key.strip()}={value}" for value in _split(values)]
        problems += _problems(text, axis)
        axes.append(axis)
    keys = Counter(text.partition("=")[0].strip() for text in texts)
    for key, count in keys.items():
        if count > 1:
            problems.append(_problem(f"{shown(key)} is given {count} times: give all its values"))
    if problems:
        raise ConfigError(problems)
    return list(itertools.product(*axes))


def _problems(text: str, axis: Sequence[str]) -> Iterator[Problem]:
    read = [read_override(override) for override in axis]
    mistakes = [problem for _, found in read for problem in found]
    if "=" not in text or mistakes:
        yield from mistakes or [_problem(f"{shown(text)} is not KEY=VALUE,VALUE")]
        return
    values = [override.value for override, _ in read if override is not None]
    for index, value in enumerate(values):
        if any(value == other and type(value) is type(other) for other in values[:index]):
            yield _problem(f"{shown(text)} has the value {value!r} twice")


def _problem(message: str) -> Problem:
    return COMMAND_LINE.problem(f"--sweep {message}")


def _split(text: str) -> list[str]:
    """The values between the commas that stand in no quotes and no brackets."""
    values, open_until = [""], ""
    for character in text:
        if character == "," and not open_until:
            values.append("")
            continue
        if open_until.endswith(character):
            open_until = open_until[:-1]
        elif character in _CLOSING and _may_open(values[-1], open_until):
            open_until += _CLOSING[character]
        values[-1] += character
    return values


def _may_open(before: str, open_until: str) -> bool:
    """Whether a quote or bracket opens something: at a value's start, or within brackets."""
    return open_until[-1] in "]}" if open_until else not before.strip()
