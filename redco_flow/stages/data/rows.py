"""Rows of raw data, good and bad: what every format's reader yields; bad rows are counted here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from redco_flow.errors import RedcoFlowError
from redco_flow.spec.raw_data import OnBadRow, SkipLimit, allowed_bad_rows

_NUM_SHOWN = 20


class BadRows(RedcoFlowError):
    """The data has rows that cannot be used and the pipeline does not allow to skip them."""


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
    """Collects bad rows while all files are read; keeps the first few, counts the rest.

    Args:
        policy: of the pipeline; `raise_if_any` raises what it does not allow.
    """

    policy: OnBadRow
    first: list[BadRow] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, row: BadRow) -> None:
        """Count a bad row."""
        self.counts[row.reason] += 1
        if len(self.first) < _NUM_SHOWN:
            self.first.append(row)

    def joined(self, other: BadRowLog) -> BadRowLog:
        """Return a log of the rows of both."""
        first = [*self.first, *other.first][:_NUM_SHOWN]
        return BadRowLog(self.policy, first, self.counts + other.counts)

    def raise_if_any(self, num_rows: int) -> None:
        """Stop where the policy says so.

        Args:
            num_rows: that were read, good or bad.

        Raises:
            BadRows: there are more bad rows than the policy allows; shows the first 20.
        """
        total, allowed = self.counts.total(), allowed_bad_rows(self.policy, num_rows)
        if allowed is None or total <= allowed:
            return
        what = f"{total} bad row{'s' if total > 1 else ''} in the data"
        advice = "Fix them, or leave them out and count them with data.on_bad_row: skip."
        if isinstance(self.policy, SkipLimit):
            what = (
                f"{total} of {num_rows} rows are bad, and data.on_bad_row: {self.policy} allows "
                f"{allowed}"
            )
            advice = "Fix them, or raise the limit."
        # A status shows the first line alone: it says how many of what, and which is the first.
        first = f", the first {self.first[0]}" if self.first else ""
        others = "".join(f"\n  {row}" for row in self.first[1:])
        more = f"\n  … and {total - len(self.first)} more" if total > len(self.first) else ""
        raise BadRows(f"{what} ({reasons_text(self.counts)}){first}{others}{more}\n{advice}")


def reasons_text(counts: Mapping[str, int]) -> str:
    """Return how many rows there are of each reason, the commonest first."""
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{count} × {reason}" for reason, count in ranked)


def problem_of_field(fields: Mapping[str, Any], key: str) -> tuple[str, str] | None:
    """Say that a row lacks a field as (reason, detail), or None."""
    if key in fields:
        return None
    names = (name if name == name.strip() else repr(name) for name in map(str, fields))
    detail = f"its fields are {', '.join(names) or '(none)'}"
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
        return f"field '{key}' is not text", kind_of(value)
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


def kind_of(value: Any) -> str:
    """Say of which type a value is."""
    if value is None:
        return "it is null"
    if isinstance(value, list) and value and all(isinstance(turn, Mapping) for turn in value):
        return (
            f"it is a conversation of {len(value)} turns; write what a model is given and what it "
            "is to answer into fields of their own"
        )
    return f"it is {type(value).__name__}"


class FileRow(NamedTuple):
    """One row of a file.

    Args:
        line: its line in a text file, its number from 1 elsewhere.
        fields: values by field name.
    """

    line: int
    fields: Mapping[str, Any]


Rows = Iterator[FileRow | BadRow]
