"""What an executor says of machines: what a check of `doctor` found, what `clean` deleted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypedDict


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


class CleanedHost(TypedDict):
    """What a host has, or had until now.

    Args:
        label: the host's name.
        problem: why it could not be asked; "" where it could.
        items: path, kind, bytes, and the reason why it stays; without one it went, or would go.
        stuck: paths that could not be deleted whole.
    """

    label: str
    problem: str
    items: list[dict[str, Any]]
    stuck: list[str]
