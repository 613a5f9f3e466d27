"""Check recurrence rules (RFC 5545) in a child process, for a rule may compute without end.

Prefect lists a rule's dates in its server's event loop: a rule that never gives one would stop the
server for good. A rule without DTSTART gets one here, because Prefect would count from 2020.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Any

from redco_flow import bounded

LEAST_SECONDS_APART = 60
_SECONDS_TO_LIST = 2.0
# Prefect's server lists as many, and stops after three beyond that time.
_NUM_DATES, _MOST_DATES, _DAYS_AHEAD = 3, 100, 100
_MOST_CHARACTERS = 6500  # of a rule, for Prefect
_MOST_SHOWN = 100
_ZERO_INTERVAL = re.compile(r"INTERVAL=[+-]?0+(?![0-9])", re.IGNORECASE)
_FREQUENCY = re.compile(r"FREQ=([A-Z]+)", re.IGNORECASE)


def checked_rule(text: str, timezone: str) -> str:
    """Return a rule with its DTSTART, once its next dates were found.

    Args:
        timezone: in which its dates are read.

    Raises:
        ValueError: it is not a rule, it has no date after now, its dates are too close together,
            or they cannot be listed within two seconds.
    """
    shown = repr(text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…")
    if len(text) > _MOST_CHARACTERS:
        raise ValueError(f"{shown} has {len(text)} characters of at most {_MOST_CHARACTERS}")
    try:
        rule: str = _check(text=text, timezone=timezone)["rule"]
    except bounded.LimitExceeded as error:
        raise ValueError(
            f"{shown}: its next dates cannot be listed ({error}), and the Prefect server would try "
            "without end; check FREQ and its BY… parts, and DTSTART if it is long ago"
        ) from error
    except bounded.BoundedError as error:
        raise ValueError(f"{shown} {error}") from error
    return rule


def next_dates(text: str, timezone: str) -> list[datetime]:
    """Return the next three dates of a rule; none where they cannot be listed in time."""
    try:
        found = _check(text=text, timezone=timezone, least_seconds=0)
    except bounded.BoundedError:
        return []
    return [datetime.fromisoformat(date) for date in found["dates"]]


def _check(**arguments: Any) -> dict[str, Any]:
    found: dict[str, Any] = bounded.call(
        f"{__name__}:check_here", seconds=_SECONDS_TO_LIST, **arguments
    )
    return found


def check_here(
    text: str, timezone: str, least_seconds: int = LEAST_SECONDS_APART
) -> dict[str, Any]:
    """Return a rule with its DTSTART, and its next dates. Runs in the child.

    Raises:
        ValueError: as of `checked_rule`.
    """
    from dateutil import tz

    if _ZERO_INTERVAL.search(text):
        raise ValueError("has INTERVAL=0; an interval is at least 1")
    zone = tz.gettz(timezone)
    now = datetime.now(zone)
    rule = _with_start(text, now)
    try:
        localized = _localized(rule, zone)
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"is not a recurrence rule (RFC 5545): {error}") from error
    dates: list[datetime] = []
    for date in localized.xafter(now, count=_MOST_DATES):
        dates.append(date)
        if len(dates) >= _NUM_DATES and date - now > timedelta(days=_DAYS_AHEAD):
            break
    if not dates:
        raise ValueError("has no date after now")
    for first, second in pairwise(dates):
        if (second - first) < timedelta(seconds=least_seconds):
            raise ValueError(
                f"has dates that are less than {least_seconds} s apart: "
                f"{first:%Y-%m-%d %H:%M:%S} and {second:%H:%M:%S}"
            )
    return {"rule": rule, "dates": [date.isoformat() for date in dates[:_NUM_DATES]]}


def _with_start(text: str, now: datetime) -> str:
    """Return a rule that begins at a date; without one, at the start of the present period."""
    if "DTSTART" in text.upper():
        return text
    found = _FREQUENCY.search(text)
    start = _period_start(found[1].upper() if found else "", now)
    # Both are with a zone, or both without, and Prefect reads both in the schedule's.
    end = "Z" if re.search(r"UNTIL=\w+Z", text, re.IGNORECASE) else ""
    lines = text.split()
    if len(lines) == 1 and ":" not in text:
        lines = [f"RRULE:{text.strip()}"]
    return "\n".join([f"DTSTART:{start:%Y%m%dT%H%M%S}{end}", *lines])


def _period_start(frequency: str, now: datetime) -> datetime:
    """Return when the present year, month, week or day began."""
    day = now.replace(hour=0, minute=0, second=0, microsecond=0)
    if frequency == "YEARLY":
        return day.replace(month=1, day=1)
    if frequency == "MONTHLY":
        return day.replace(day=1)
    return day - timedelta(days=day.weekday()) if frequency == "WEEKLY" else day


def _localized(text: str, zone: Any) -> Any:
    """Return a rule as Prefect reads it: its dates are those of clocks in the zone."""
    from dateutil.rrule import rrule, rrulestr

    found: Any = rrulestr(text)
    if isinstance(found, rrule):
        return _in_zone(found, zone)
    found._rrule = [_in_zone(one, zone) for one in found._rrule]
    found._exrule = [_in_zone(one, zone) for one in found._exrule]
    found._rdate = list(_dates_in_zone(found._rdate, zone))
    found._exdate = list(_dates_in_zone(found._exdate, zone))
    return found


def _in_zone(rule: Any, zone: Any) -> Any:
    until = {"until": rule._until.replace(tzinfo=zone)} if rule._until else {}
    return rule.replace(dtstart=rule._dtstart.replace(tzinfo=zone), **until)


def _dates_in_zone(dates: list[datetime], zone: Any) -> Iterator[datetime]:
    return (date.replace(tzinfo=zone) for date in dates)
