"""Rows that cannot be used: remembered with their file and line, counted, reported together.

Knows the policy (stop, or skip and count). Refuses to know file formats.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

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
        place: "file:line", or whatever names the row best.
        reason: a few words that several rows may share, for counting: "not JSON".
        detail: what is wrong with this one and what is allowed.
    """

    place: str
    reason: str
    detail: str

    def __str__(self) -> str:
        return f"{self.place}: {self.reason}{': ' if self.detail else ''}{self.detail}"


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
        shown = "\n".join(f"  {row}" for row in self.first)
        more = f"\n  … and {total - len(self.first)} more" if total > len(self.first) else ""
        raise BadRows(
            f"{total} bad row{'s' if total > 1 else ''} in the data:\n{shown}{more}\n"
            "Mend them, or leave them out and count them with data.on_bad_row: skip."
        )
