"""The time of day, for people: one format everywhere.

It orders nothing: clocks differ and jump. What must be ordered carries a sequence number.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

Clock = Callable[[], str]


def utc_now() -> str:
    """Return the present as ISO 8601 in UTC with milliseconds, `2026-01-31T12:00:00.000+00:00`."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")
