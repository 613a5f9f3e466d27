"""Make up for firings that came due while nothing served, of which Prefect has no flow run.

Prefect's server makes the flow runs of three dates, or of one hour, ahead. Where it did not run for
longer, those of the dates after them are lacking.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any
from uuid import UUID

from redco_flow.orchestrate.recurring.deployments import due_dates, on_server
from redco_flow.spec.schedule import LEAST_SECONDS_APART, last_dates
from redco_flow.tracking.process_identity import utc_now
from redco_flow.tracking.schedules import Firing, FiringState, ScheduleDirectory

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient

MOST_MADE_UP = 100
"""Firings of a schedule that are made up for after one time without serving, the last ones."""


def make_up(
    directory: ScheduleDirectory,
    deployment_id: UUID,
    client: SyncPrefectClient,
    after: datetime,
    until: datetime | None = None,
) -> None:
    """Schedule the flow runs that a deployment lacks, as its parameter `missed` says.

    The dates that are not made up for become one record of the schedule's history.

    Args:
        after, until: when nothing served; until now by default. What was due before the schedule
            was last changed is not of it.
    """
    from prefect.states import Scheduled

    deployment = client.read_deployment(deployment_id)
    if deployment.paused:
        return
    until = until or datetime.now(UTC)
    dates = asyncio.run(_last_dates(deployment.schedules, after, until))
    if not dates:
        return
    missed = deployment.parameters.get("missed")
    first = len(dates) - {"all": MOST_MADE_UP, "latest": 1}.get(str(missed), 0)
    known = due_dates(deployment_id, dates[0], dates[-1], client)
    left = [date for date in dates[: max(first, 0)] if date not in known]
    if left:
        _note_left(directory, left, f"missed: {missed}", is_cut=len(dates) > MOST_MADE_UP)
    for date in dates[max(first, 0) :]:
        if date not in known:
            client.create_flow_run_from_deployment(
                deployment_id, state=Scheduled(scheduled_time=date)
            )


def _note_left(
    directory: ScheduleDirectory, left: list[datetime], policy: str, *, is_cut: bool
) -> None:
    first, last = (date.isoformat(timespec="seconds") for date in (left[0], left[-1]))
    dates = f"{len(left)}{' or more' if is_cut else ''} due, from {first} to {last}"
    most = f", which makes up for {MOST_MADE_UP} at most" if policy == "missed: all" else ""
    firing = Firing(f"missed-{left[0]:%Y%m%dT%H%M%S}", first, FiringState.WAITING, began=utc_now())
    with directory.locked():
        reason = f"nothing served: {dates} ({policy}{most})"
        directory.end_firing(firing, FiringState.SKIPPED, reason)


async def _last_dates(schedules: list[Any], after: datetime, until: datetime) -> list[datetime]:
    """Return when schedules were due, one date more than are made up for."""
    found: set[datetime] = set()
    for one in schedules:
        start = max(after, one.updated)
        if one.active and start < until:
            dates = await _last_dates_of(one.schedule, start, until)
            found.update(date.astimezone(UTC) for date in dates)
    return sorted(found)[-MOST_MADE_UP - 1 :]


async def _last_dates_of(schedule: Any, after: datetime, until: datetime) -> list[datetime]:
    """Return the last dates in a period, of which only an end that has enough is listed."""
    if (rule := getattr(schedule, "rrule", None)) is not None:
        return last_dates(rule, schedule.timezone or "UTC", after, until, MOST_MADE_UP + 1)
    span = timedelta(seconds=LEAST_SECONDS_APART) * MOST_MADE_UP
    while True:
        start = max(after, until - span)
        dates: list[datetime] = []
        while page := await on_server(schedule).get_dates(None, start, until):
            dates += page
            start = page[-1] + timedelta(seconds=1)
        if until - span <= after or len(dates) > MOST_MADE_UP:
            return dates
        span *= 2
