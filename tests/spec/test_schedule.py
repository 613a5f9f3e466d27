"""The `schedule:` block: what it takes, what it refuses, and when it fires around clock changes."""

import asyncio
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from zoneinfo import ZoneInfo

import pytest
from pydantic import ValidationError

from redco_flow.spec.schedule import (
    ScheduleSection,
    checked_rule,
    interval_of,
    interval_text,
    last_dates,
    next_dates,
)

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
        ({"cron": "0 3 * * 1", "every": "6h"}, "'cron', 'every' are given"),
        ({"cron": "0 3 * *"}, "has 4 fields; cron has five"),
        ({"cron": "0 25 * * 1"}, "is not a cron expression"),
        ({"cron": "0 3 LW * *"}, "Prefect server, .* does not take 'LW'; write an rrule"),
        ({"cron": "0 3 * * 1L,5#3,2"}, "does not take '1L', '5#3'"),
        ({"every": "0h"}, "is not an interval; write 90s"),
        ({"every": "soon"}, "is not an interval"),
        ({"every": "59s"}, "is too short; firings are 60s apart or more"),
        ({"every": "99999999999999999w"}, "is too long an interval"),
        ({"every": "9" * 5000 + "w"}, "is too long an interval"),
        ({"every": "11000d"}, "is longer than ten years"),
        ({"rrule": "FREQ=SOMETIMES"}, "is not a recurrence rule"),
        ({"rrule": "FREQ=DAILY;INTERVAL=0"}, "an interval is at least 1"),
        ({"rrule": "FREQ=SECONDLY;INTERVAL=30"}, "less than 60 s apart"),
        ({"rrule": "FREQ=WEEKLY;BYDAY=MO,TU,SU;BYSECOND=0,1;BYSETPOS=1,3,5,6"}, "60 s apart"),
        ({"rrule": "FREQ=DAILY;UNTIL=20200101"}, "has no date after now"),
        ({"rrule": "FREQ=DAILY;INTERVAL=99999999999"}, "has no date after now"),
        ({"rrule": f"FREQ=DAILY;BYHOUR={'3,' * 9999}3"}, "characters of at most 6500"),
        ({"every": "6h", "timezone": "Europe/Brelin"}, "is not a time zone"),
        ({"every": "6h", "timezone": "posix/UTC"}, "is not a time zone"),
        ({"every": "6h", "overlap": "both"}, "'skip', 'queue' or 'cancel_running'"),
        ({"every": "6h", "retries": -1}, "greater than or equal to 0"),
    ],
)
def test_a_mistake_is_told(block, message):
    with pytest.raises(ValidationError, match=message):
        ScheduleSection(**block)


@pytest.mark.slow  # two seconds of CPU time each
@pytest.mark.parametrize(
    "rule",
    ["FREQ=MINUTELY;BYMONTH=2;BYMONTHDAY=30", "DTSTART:19000101T000000 FREQ=SECONDLY;INTERVAL=30"],
)
def test_a_rule_whose_dates_never_come_is_refused(rule):
    """python-dateutil would look for them without end."""
    with pytest.raises(ValidationError, match="its next dates cannot be listed"):
        ScheduleSection(rrule=rule)


@pytest.mark.parametrize(
    ("rule", "start"),
    [
        ("FREQ=MONTHLY;BYDAY=-1FR;BYHOUR=3", lambda now: now.replace(day=1)),
        ("RRULE:FREQ=YEARLY", lambda now: now.replace(month=1, day=1)),
        ("FREQ=WEEKLY;INTERVAL=2", lambda now: now - timedelta(days=now.weekday())),
        ("FREQ=DAILY;UNTIL=21000101T000000Z", lambda now: now),
        ("DTSTART:20260101T050000\nRRULE:FREQ=DAILY", None),
    ],
)
def test_prefect_lists_the_dates_of_a_rule_that_begins_with_the_present_period(rule, start):
    """Prefect would count a rule without DTSTART from 2020."""
    from prefect.server.schemas.schedules import RRuleSchedule

    today = datetime.now(BERLIN).replace(hour=0, minute=0, second=0, microsecond=0)
    checked = checked_rule(rule, "Europe/Berlin")

    prefect = RRuleSchedule(rrule=checked, timezone="Europe/Berlin")
    dates = asyncio.run(prefect.get_dates(3, datetime.now(UTC)))

    assert next_dates(checked, "Europe/Berlin") == dates
    assert last_dates(checked, "Europe/Berlin", dates[0], dates[-1], 2) == dates[1:]
    assert checked_rule(checked, "Europe/Berlin") == checked
    if start is not None:
        assert checked.startswith(f"DTSTART:{start(today):%Y%m%dT%H%M%S}")
    else:
        assert checked == rule


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
