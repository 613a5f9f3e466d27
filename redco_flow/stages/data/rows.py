"""Rows of raw data, good and bad: what every format's reader yields; bad rows are counted here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from redco_flow.errors import RedcoFlowError

_NUM_SHOWN = 20


class BadRows(RedcoFlowError):
    """The data has rows that cannot be used and the pipeline does not allow to skip them."""


class DataChanged(RedcoFlowError):
    """A data file is not what the stage's fingerprint was made of."""


class NoRows(RedcoFlowError):
    """A split has no usable row."""


@dataclass(frozen=True)
class BadRow:
    """One row that cannot be used.

    Args:
        location: "file:line", or whatever names the row best.
        reason: a few words that several rows may share, for counting: "not JSON".
        detail: what is wrong with this one and what is allowed.
    """

    location: str
    reason: str
    detail: str

    def __str__(self) -> str:
        return f"{self.location}: {self.reason}{': ' if self.detail else ''}{self.detail}"


@dataclass
class BadRowLog:
    """Collects bad rows while all files are read; keeps the first few, counts the rest."""

    policy: Literal["error", "skip"]
    first: list[BadRow] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, row: BadRow) -> None:
        """Count a bad row."""
        self.counts[row.reason] += 1
        if len(self.first) < _NUM_SHOWN:
            self.first.append(row)

    def raise_if_any(self) -> None:
        """Stop where the policy says so.

        Raises:
            BadRows: there are bad rows and the policy is "error"; shows the first 20.
        """
        total = self.counts.total()
        if self.policy == "skip" or not total:
            return
        # A status shows the first line alone: it says how many of what, and which is the first.
        reasons = ", ".join(f"{count} × {reason}" for reason, count in self.counts.most_common())
        others = "".join(f"\n  {row}" for row in self.first[1:])
        more = f"\n  … and {total - len(self.first)} more" if total > len(self.first) else ""
        raise BadRows(
            f"{total} bad row{'s' if total > 1 else ''} in the data ({reasons}), "
            f"the first {self.first[0]}{others}{more}\n"
            "Mend them, or leave them out and count them with data.on_bad_row: skip."
        )


def problem_of_field(fields: Mapping[str, Any], key: str) -> tuple[str, str] | None:
    """Say that a row lacks a field as (reason, detail), or None."""
    if key in fields:
        return None
    detail = f"its fields are {', '.join(map(str, fields)) or '(none)'}"
    if len(fields) == 1:
        detail += delimiter_hint(str(next(iter(fields))))
    return f"no field '{key}'", detail


def delimiter_hint(name: str) -> str:
    """Name the key for another delimiter, where a file's only column is named like several."""
    found = next((mark for mark in ";\t|," if mark in name), None)
    if found is None:
        return ""
    shown = "\\t" if found == "\t" else found
    return f" (is '{shown}' the delimiter? data.csv: {{delimiter: \"{shown}\"}})"


def problem_of_text(fields: Mapping[str, Any], key: str) -> tuple[str, str] | None:
    """Say what is wrong with one field of a row as (reason, detail), or None."""
    if problem := problem_of_field(fields, key):
        return problem
    value = fields[key]
    if not isinstance(value, str):
        return f"field '{key}' is not text", _kind_of(value)
    if not value or value.isspace():
        return f"field '{key}' is empty", ""
    if "\0" in value:
        return "NUL byte", f"in field '{key}'"
    if value.isascii():
        return None
    try:
        value.encode()
    except UnicodeEncodeError:
        return "half a surrogate pair", f"in field '{key}'"
    return None


def _kind_of(value: Any) -> str:
    if isinstance(value, list) and value and all(isinstance(turn, Mapping) for turn in value):
        return (
            f"it is a conversation of {len(value)} turns; write what a model is given and what it "
            "is to answer into fields of their own"
        )
    return f"it is {type(value).__name__}"


class FileRow(NamedTuple):
    """One row as it stands in a file.

    Args:
        line: its line in a text file, its number from 1 elsewhere.
        fields: values by field name.
    """

    line: int
    fields: Mapping[str, Any]


Rows = Iterator[FileRow | BadRow]
