"""What a check of `redco-flow doctor` found."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One check's outcome.

    Args:
        check: what was looked at.
        is_good: whether it can be used as it is.
        detail: what was found.
        remedy: what to do where it is not good.
    """

    check: str
    is_good: bool
    detail: str
    remedy: str = ""
