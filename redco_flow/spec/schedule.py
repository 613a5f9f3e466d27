"""The `schedule:` section of a pipeline, checked."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Annotated, Literal
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from pydantic import AfterValidator, model_validator

from redco_flow.spec.model import Name, NonNegativeInt, StrictModel, Text
from redco_flow.spec.recurrence import LEAST_SECONDS_APART, checked_rule

_INTERVAL = re.compile(r"([0-9]+)\s*([smhdw])")
_LONGEST = timedelta(days=3660)
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


def interval_of(text: str) -> timedelta:
    """Return how long `90s`, `30m`, `6h`, `1d` or `2w` is.

    Raises:
        ValueError: it is none of these, nothing, or more than Python can count.
    """
    found = _INTERVAL.fullmatch(text.strip())
    if found is None or not found[1].strip("0"):
        raise ValueError(f"{text!r} is no interval; write 90s, 30m, 6h, 1d or 2w")
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
        raise ValueError(f"{text!r} is no cron expression: {error}") from error
    except StopIteration:
        raise ValueError(f"{text!r} has no date within the next 50 years") from None
    return text


def _checked_timezone(text: str) -> str:
    try:
        ZoneInfo(text)
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise ValueError(f"{text!r} is no time zone; write one as Europe/Berlin or UTC") from error
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
    rrule: Text | None = None
    timezone: Annotated[Text, AfterValidator(_checked_timezone)] | None = None
    profile: Text | None = None
    overlap: Literal["skip", "queue", "cancel_running"] = "skip"
    missed: Literal["latest", "skip", "all"] = "latest"
    retries: NonNegativeInt = 0

    @model_validator(mode="after")
    def _says_when_once(self) -> ScheduleSection:
        given = [key for key in ("cron", "every", "rrule") if getattr(self, key) is not None]
        if len(given) != 1:
            said = f"{' and '.join(given)} are given" if given else "none is given"
            raise ValueError(f"a schedule has one of cron, every and rrule; {said}")
        if self.rrule is not None:
            checked_rule(self.rrule, self.timezone or "UTC")
        return self
