"""Replace `${…}` in a document's texts by what it stands for.

`${env:NAME}`, `${env:NAME,default}`, `${date:%Y-%m-%d}` (or a day before, `${date:%Y-%m-%d,-1d}`),
and `${key}`: one value of the same document, by its dotted path; `$${` is a literal `${`. A text
that is one reference and nothing else takes the value's type; a date is text. What a variable of
the environment holds is never interpolated again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import islice
from typing import Any
from zoneinfo import ZoneInfo

from redco_flow.errors import Problem
from redco_flow.spec.document import Document, KeyPath, leaves
from redco_flow.spec.model import Scalar
from redco_flow.spec.names import dotted, nearest
from redco_flow.spec.schedule import interval_of
from redco_flow.spec.secrets import looks_secret_name
from redco_flow.spec.yaml import control_problem, read_scalar

MAX_CHARACTERS = 1 << 20

DATE_VARIABLE = "REDCO_FLOW_DATE"
"""The environment variable of the moment that `${date:…}` means, ISO 8601; without it: now. A
schedule's firing sets it to when it was due."""

TIMEZONE_VARIABLE = "REDCO_FLOW_TIMEZONE"
"""The environment variable of the time zone of that moment, such as Europe/Berlin; without it: the
offset that is written there, or this machine's time zone. A schedule's firing sets it, too."""

_WITHOUT_PATH = ("env:", "date:")
_REFERENCE = re.compile(r"\$\$\{|\$\{([^{}]*)\}|\$\{")
_DATE = re.compile(r"date:([^,]+?)(?:,\s*-\s*([^,]+))?")
_ENVIRONMENT = re.compile(r"env:([A-Za-z_][A-Za-z0-9_]*)(?:,(.*))?", re.DOTALL)


def interpolate(document: Document, environ: Mapping[str, str]) -> tuple[Document, list[Problem]]:
    """Return the document with its references replaced, and the mistakes in them."""
    return _Interpolation(document, environ).run()


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

    is_of_machine = False


READ_BY_A_JOB = ("staging", "directory")
"""The key of a profile in which $NAME is a variable of the job."""


class _Unset(_Bad):
    """The environment lacks a variable."""

    is_of_machine = True


@dataclass
class _Interpolation:
    """One pass over a document; what references bring in is bounded as a file's size is."""

    document: Document
    environ: Mapping[str, str]
    num_characters: int = 0
    problems: list[Problem] = field(default_factory=list)

    def run(self) -> tuple[Document, list[Problem]]:
        """Return the document with every text expanded; a text with a mistake stays as it is."""
        values = self._replaced((), self.document.values)
        return Document(values, self.document.origins), self.problems

    def _replaced(self, path: KeyPath, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: self._replaced((*path, key), child) for key, child in value.items()}
        if isinstance(value, list):
            return [self._replaced((*path, index), child) for index, child in enumerate(value)]
        if not (isinstance(value, str) and "${" in value):
            return value
        try:
            return _expand(value, self._value)
        except _Bad as bad:
            origin, message = self.document.origin(path), f"'{dotted(path)}': {bad}"
            if path[-2:] == READ_BY_A_JOB:
                message += " A variable of the job is written without braces: $NAME."
            self.problems.append(origin.problem(message, is_of_machine=bad.is_of_machine))
            return value

    def _value(self, reference: str) -> Scalar:
        if reference.startswith(_WITHOUT_PATH):
            return self._outside_value(reference)
        path = find_path(self.document.values, reference)
        if path is None:
            raise _Bad(self._unknown(reference))
        value: Scalar | dict[str, Any] | list[Any] = self.document.get(path)
        if isinstance(value, dict | list):
            raise _Bad(
                f"'{reference}' is a {'mapping' if isinstance(value, dict) else 'list'}, and "
                f"${{key}} stands for one value; write it out here, or use a YAML alias (*name)"
            )
        self._count(value)
        if isinstance(value, str) and "${" in value:
            return _expand(value, lambda inner: self._value_behind(reference, inner))
        return value

    def _value_behind(self, key: str, reference: str) -> Scalar:
        if reference.startswith(_WITHOUT_PATH):
            return self._outside_value(reference)
        raise _Bad(
            f"'{key}' is itself written as ${{{reference}}}, and references do not follow each "
            f"other; refer here to the key that holds the value"
        )

    def _outside_value(self, reference: str) -> Scalar:
        """The value of a reference to something outside of documents."""
        if reference.startswith("env:"):
            return self._environment_value(reference)
        return self._date_text(reference)

    def _date_text(self, reference: str) -> str:
        found = _DATE.fullmatch(reference)
        if found is None or "%" not in found[1]:
            raise _Bad("write ${date:%Y-%m-%d}, or ${date:%Y-%m-%d,-1d} for the day before")
        try:
            moment = self._moment()
            moment = _before(moment, found[2]) if found[2] else moment
        except (ValueError, OverflowError) as error:
            raise _Bad(str(error)) from error
        text = moment.strftime(found[1])
        if problem := control_problem(text):
            raise _Bad(f"${{{reference}}}: {problem}")
        self._count(text)
        return text

    def _moment(self) -> datetime:
        """Return the current time, or the one that the environment gives for dates."""
        zone = self._zone()
        given = self.environ.get(DATE_VARIABLE)
        if not given:
            from dateutil.tz import tzlocal

            return datetime.now(zone or tzlocal())
        try:
            moment = datetime.fromisoformat(given)
        except ValueError as error:
            raise ValueError(
                f"environment variable {DATE_VARIABLE} is no date: write 2026-11-23 or "
                "2026-11-23T03:00:00+01:00"
            ) from error
        if zone is None:
            return moment
        return moment.astimezone(zone) if moment.tzinfo else moment.replace(tzinfo=zone)

    def _zone(self) -> ZoneInfo | None:
        name = self.environ.get(TIMEZONE_VARIABLE)
        try:
            return ZoneInfo(name) if name else None
        except (ValueError, KeyError, OSError) as error:
            raise ValueError(
                f"environment variable {TIMEZONE_VARIABLE} is no time zone: write Europe/Berlin"
            ) from error

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
        text = self.environ.get(name, default)
        if text is None:
            raise _Unset(
                f"environment variable {name} is not set; set it, or write ${{env:{name},default}}"
            )
        if problem := control_problem(text):
            raise _Bad(f"environment variable {name}: {problem}")
        self._count(text)
        try:
            return read_scalar(text) if text else ""
        except ValueError:
            return text

    def _count(self, value: Scalar) -> None:
        """Count what a reference brings in, so that a few lines cannot fill the memory."""
        self.num_characters += 1 + len(str(value))
        if self.num_characters > MAX_CHARACTERS:
            raise _Bad(f"references make texts of more than {MAX_CHARACTERS:,} characters")

    def _unknown(self, reference: str) -> str:
        stage, outputs, output = reference.removeprefix("stages.").partition(".outputs.")
        if reference.startswith("stages.") and outputs:
            selector = output.partition("/")[1:]
            return f"${{{reference}}} is no longer understood; write {stage}{''.join(selector)}"
        if reference.startswith("profile."):
            return (
                f"${{{reference}}} is no longer understood; write the value here, or let this "
                f"file and the profile read one variable, ${{env:NAME,default}}"
            )
        known = [dotted(leaf) for leaf in islice(leaves(self.document.values), 500)]
        return f"nothing is written at '{reference}'{nearest(reference, known)}"


def _before(moment: datetime, interval: str) -> datetime:
    """Return a moment earlier by an interval: days and weeks of the calendar, or elapsed time.

    In the days when clocks change, `1d` is the same time of the day before, and `24h` is not.
    """
    before = interval_of(interval)
    if interval.strip()[-1] in "dw" or moment.tzinfo is None:
        return moment - before
    return (moment.astimezone(UTC) - before).astimezone(moment.tzinfo)


def _expand(text: str, value_of: Callable[[str], Scalar]) -> Scalar:
    def part(found: re.Match[str]) -> str:
        if found.group() == "$${":
            return "${"
        if found.group(1) is None:
            raise _Bad("'${' without its '}'; write '$${' for the text '${'")
        value = value_of(found.group(1).strip())
        if isinstance(value, bool) or value is None:
            return {True: "true", False: "false", None: "null"}[value]
        return str(value)

    whole = _REFERENCE.fullmatch(text)
    if whole and whole.group(1) is not None:
        return value_of(whole.group(1).strip())
    return _REFERENCE.sub(part, text)


def find_path(values: Any, text: str) -> KeyPath | None:
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
