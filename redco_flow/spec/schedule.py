"""The `schedule:` section of a pipeline, checked."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Annotated, Any, Literal
from zoneinfo import available_timezones

from pydantic import AfterValidator, ValidationInfo, field_validator, model_validator

from redco_flow import bounded
from redco_flow.spec.model import Name, NonNegativeInt, StrictModel, Text
from redco_flow.spec.names import quoted

LEAST_SECONDS_APART = 60
_SECONDS_TO_LIST = 2.0
# Prefect's server lists as many, and stops after three beyond that time.
_NUM_DATES, _MOST_DATES, _DAYS_AHEAD = 3, 100, 100
_MOST_CHARACTERS = 6500  # of a rule, for Prefect
_MOST_SHOWN = 100
_ZERO_INTERVAL = re.compile(r"INTERVAL=[+-]?0+(?![0-9])", re.IGNORECASE)
_FREQUENCY = re.compile(r"FREQ=([A-Z]+)", re.IGNORECASE)

_INTERVAL = re.compile(r"([0-9]+)\s*([smhdw])")
_LONGEST = timedelta(days=3660)
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


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


def last_dates(
    text: str, timezone: str, after: datetime, until: datetime, most: int
) -> list[datetime]:
    """Return the last dates of a rule in a period.

    Raises:
        ValueError: they cannot be listed within two seconds.
    """
    try:
        dates: list[str] = bounded.call(
            f"{__name__}:list_here",
            seconds=_SECONDS_TO_LIST,
            text=text,
            timezone=timezone,
            after=after.isoformat(),
            until=until.isoformat(),
            most=most,
        )
    except bounded.BoundedError as error:
        raise ValueError(
            f"the dates of {text[:_MOST_SHOWN]!r} cannot be listed: {error}"
        ) from error
    return [datetime.fromisoformat(date) for date in dates]


def list_here(text: str, timezone: str, after: str, until: str, most: int) -> list[str]:
    """Return the last dates of a rule in a period. Runs in the child."""
    from dateutil import tz

    period = (datetime.fromisoformat(after), datetime.fromisoformat(until))
    dates = _localized(text, tz.gettz(timezone)).between(*period, inc=True)
    return [date.isoformat() for date in dates[-most:]]


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


def interval_of(text: str) -> timedelta:
    """Return how long `90s`, `30m`, `6h`, `1d` or `2w` is.

    Raises:
        ValueError: it is none of these, nothing, or more than Python can count.
    """
    found = _INTERVAL.fullmatch(text.strip())
    if found is None or not found[1].strip("0"):
        raise ValueError(f"{text!r} is not an interval; write 90s, 30m, 6h, 1d or 2w")
    try:
        return timedelta(**{_UNITS[found[2]]: int(found[1])})
    except (OverflowError, ValueError):  # ValueError: a number of too many digits
        raise ValueError(f"{text[:40]!r} is too long an interval") from None


def interval_text(interval: timedelta) -> str:
    """Return an interval as it is written: `6h`."""
    seconds = round(interval.total_seconds())
    for unit in reversed(_UNITS):
        size = round(timedelta(**{_UNITS[unit]: 1}).total_seconds())
        if seconds % size == 0:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"


def checked_interval(text: str) -> str:
    """Return the text, if it is an interval of at most ten years.

    Raises:
        ValueError: it is longer, or as `interval_of`.
    """
    if interval_of(text) > _LONGEST:
        raise ValueError(f"{text!r} is longer than ten years")
    return text


def _checked_every(text: str) -> str:
    if interval_of(checked_interval(text)).total_seconds() < LEAST_SECONDS_APART:
        raise ValueError(f"{text!r} is too short; firings are {LEAST_SECONDS_APART}s apart or more")
    return text


def _checked_cron(text: str) -> str:
    from cronsim import CronSim, CronSimError

    if len(text.split()) != 5:
        raise ValueError(
            f"{text!r} has {len(text.split())} fields; cron has five: minute, hour, day of the "
            "month, month, day of the week ('0 3 * * 1' is Mondays at 03:00)"
        )
    try:
        next(CronSim(text, datetime.now(UTC)))
    except CronSimError as error:
        raise ValueError(f"{text!r} is not a cron expression: {error}") from error
    except StopIteration:
        raise ValueError(f"{text!r} has no date within the next 50 years") from None
    if refused := _words_refused_by_prefect(text):
        raise ValueError(
            f"{text!r}: the Prefect server, which computes the dates, does not take "
            f"{quoted(refused)}; write an rrule, such as 'FREQ=MONTHLY;BYDAY=-1MO' for the last "
            "Monday of each month"
        )
    return text


def _words_refused_by_prefect(cron: str) -> list[str]:
    """Return the days that cronsim takes, and croniter, by which Prefect reads cron, does not."""
    _, _, day, _, weekday = (field.split(",") for field in cron.upper().split())
    numbered = [word for word in weekday if "#" in word]
    return [
        *(word for word in day if word == "LW"),
        *(word for word in weekday if word.endswith("L")),
        *(numbered if len(numbered) < len(weekday) else ()),
    ]


def _checked_timezone(text: str) -> str:
    if text not in available_timezones():  # ZoneInfo takes more, as posix/UTC, and Prefect does not
        raise ValueError(f"{text!r} is not a time zone; write one as Europe/Berlin or UTC")
    return text


class ScheduleSection(StrictModel):
    """The schedule of a pipeline, active once `redco-flow schedule add` has registered it.

    Args:
        name: the schedule's name; the pipeline's by default.
        cron: minute, hour, day of the month, month, day of the week.
        every: an interval: 90s, 30m, 6h, 1d, 2w; at least 60s.
        rrule: a recurrence rule of RFC 5545, such as `FREQ=MONTHLY;BYDAY=-1FR;BYHOUR=3`. Without a
            DTSTART it begins with the present year, month, week or day, after its FREQ.
        timezone: of cron and rrule; None: this machine's.
        profile: the profile of its runs; None: local.
        overlap: if the previous run is still running: `skip` this one, `queue` it, or
            `cancel_running`.
        missed: runs to make up for after a time in which nothing served schedules: the `latest`,
            `all`, one after the other, or none (`skip`).
        retries: new attempts for the failed stages of a firing.
    """

    name: Name | None = None
    cron: Annotated[Text, AfterValidator(_checked_cron)] | None = None
    every: Annotated[Text, AfterValidator(_checked_every)] | None = None
    timezone: Annotated[Text, AfterValidator(_checked_timezone)] | None = None
    rrule: Text | None = None
    profile: Text | None = None
    overlap: Literal["skip", "queue", "cancel_running"] = "skip"
    missed: Literal["latest", "skip", "all"] = "latest"
    retries: NonNegativeInt = 0

    @field_validator("rrule")
    @classmethod
    def _check_rule(cls, rrule: str | None, info: ValidationInfo) -> str | None:
        if rrule is not None:
            checked_rule(rrule, info.data.get("timezone") or "UTC")
        return rrule

    @model_validator(mode="after")
    def _says_when_once(self) -> ScheduleSection:
        given = [key for key in ("cron", "every", "rrule") if getattr(self, key) is not None]
        if len(given) != 1:
            said = f"{quoted(given)} are given" if given else "none is given"
            raise ValueError(f"a schedule has one of cron, every and rrule; {said}")
        return self
