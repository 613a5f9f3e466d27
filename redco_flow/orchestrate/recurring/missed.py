"""Make up for firings that came due while nothing served, of which Prefect has no flow run.

Prefect's server makes the flow runs of three dates, or of one hour, ahead. Where it did not run for
longer, those of the dates after them are lacking.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any
from uuid import UUID

from redco_flow.orchestrate.recurring.deployments import MISSED_TAG, due_dates, on_server
from redco_flow.spec.schedule import LEAST_SECONDS_APART, last_dates
from redco_flow.tracking.process_identity import utc_now
from redco_flow.tracking.schedules import Firing, FiringState, ScheduleDirectory

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.responses import DeploymentResponse

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
    keys = asyncio.run(_last_dates(deployment, after, until))
    if not keys:
        return
    dates = list(keys)
    missed = deployment.parameters.get("missed")
    first = len(dates) - {"all": MOST_MADE_UP, "latest": 1}.get(str(missed), 0)
    known = due_dates(deployment_id, dates[0], dates[-1], client)
    left = [date for date in dates[: max(first, 0)] if date not in known]
    for date in dates[max(first, 0) :]:
        if date not in known:
            client.create_flow_run_from_deployment(
                deployment_id,
                state=Scheduled(scheduled_time=date),
                tags=[MISSED_TAG],
                idempotency_key=keys[date],
            )
    if left:
        _note_left(directory, left, f"missed: {missed}", is_cut=len(dates) > MOST_MADE_UP)


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


async def _last_dates(
    deployment: DeploymentResponse, after: datetime, until: datetime
) -> dict[datetime, str]:
    """Return when a deployment was due, in order, one date more than are made up for.

    Returns:
        by date, the key that the server's own flow run of the date has: it makes no second one.
    """
    found: dict[datetime, str] = {}
    for one in deployment.schedules:
        start = max(after, one.updated or after)
        if one.active and start < until:
            dates = await _last_dates_of(one.schedule, start, until)
            for date in dates:
                key = f"scheduled {deployment.id} {one.id} {date}"
                found.setdefault(date.astimezone(UTC), key)
    return dict(sorted(found.items())[-MOST_MADE_UP - 1 :])


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
