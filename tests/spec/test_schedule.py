"""The `schedule:` block: what it takes, what it refuses, and when it fires around clock changes."""

import asyncio
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from zoneinfo import ZoneInfo

import pytest
from pydantic import ValidationError

from redco_flow.spec.schedule import ScheduleSection, interval_of, interval_text

BERLIN = ZoneInfo("Europe/Berlin")


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("30m", 1800), ("6h", 21600), ("1d", 86400), ("2w", 1209600)]
)
def test_an_interval_is_a_number_and_a_unit(text, seconds):
    assert interval_of(text) == timedelta(seconds=seconds)
    assert interval_of(interval_text(timedelta(seconds=seconds))) == timedelta(seconds=seconds)


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({}, "one of cron, every and rrule; none is given"),
        ({"cron": "0 3 * * 1", "every": "6h"}, "cron and every are given"),
        ({"cron": "0 3 * *"}, "has 4 fields; cron has five"),
        ({"cron": "0 25 * * 1"}, "is no cron expression"),
        ({"every": "0h"}, "is no interval; write 90s"),
        ({"every": "soon"}, "is no interval"),
        ({"rrule": "FREQ=SOMETIMES"}, "is no recurrence rule"),
        ({"every": "6h", "timezone": "Europe/Brelin"}, "is no time zone"),
        ({"every": "6h", "overlap": "both"}, "'skip', 'queue' or 'cancel_running'"),
        ({"every": "6h", "retries": -1}, "greater than or equal to 0"),
    ],
)
def test_a_mistake_is_told(block, message):
    with pytest.raises(ValidationError, match=message):
        ScheduleSection(**block)


@pytest.mark.parametrize(
    ("day", "hours_utc"),
    [
        # 02:30 does not exist: the clock goes from 02:00 to 03:00.
        (datetime(2026, 3, 29, tzinfo=BERLIN), None),
        # 02:30 is there twice.
        (datetime(2026, 10, 25, tzinfo=BERLIN), None),
        (datetime(2026, 7, 1, tzinfo=BERLIN), 0.5),
    ],
)
def test_a_firing_at_half_past_two_comes_once_a_day_whatever_the_clock_does(day, hours_utc):
    """Fault 51: by Prefect's own computation, which is what decides when a schedule fires."""
    from prefect.server.schemas.schedules import CronSchedule

    schedule = CronSchedule(cron="30 2 * * *", timezone="Europe/Berlin")
    start = (day - timedelta(hours=12)).astimezone(UTC)

    dates = asyncio.run(schedule.get_dates(4, start))

    of_day = [one for one in dates if one.astimezone(BERLIN).date() == day.date()]
    assert len(of_day) == 1
    assert all(timedelta(hours=22) < b - a < timedelta(hours=26) for a, b in pairwise(dates))
    if hours_utc is not None:
        assert of_day[0].astimezone(UTC).hour + of_day[0].minute / 60 == hours_utc
