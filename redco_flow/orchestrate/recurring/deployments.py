"""A schedule as Prefect knows it: a deployment of `flows/recurring.py` on a pool of processes.

What is edited on the deployment's page counts: its schedule says when, its parameters what runs.
Prefect is imported in functions, after `prepare_environment`.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID
from zoneinfo import ZoneInfo

from pydantic import ValidationError

from redco_flow.errors import DamagedRecord, UsageError
from redco_flow.orchestrate.prefect.api import (
    FLOW,
    PrefectApi,
    deleted_schedules,
    forget_deleted,
    ui_url,
)
from redco_flow.orchestrate.prefect.report import (
    SCHEDULE_VARIABLE,
    prepare_environment,
    watch_for_cancelling,
)
from redco_flow.orchestrate.prefect.server import (
    PrefectServerError,
    api_at,
    ensure_server,
    prefect_directory,
)
from redco_flow.orchestrate.recurring.firing import Firer, Terms
from redco_flow.orchestrate.recurring.silence import forget_silence
from redco_flow.spec.find import find_file
from redco_flow.spec.interpolation import DATE_VARIABLE, TIMEZONE_VARIABLE
from redco_flow.spec.schedule import (
    ScheduleSection,
    checked_rule,
    interval_of,
    interval_text,
    next_dates,
)
from redco_flow.tracking.schedules import Firing, Schedule, ScheduleDirectory
from redco_flow.tracking.workspace import Workspace, user_name

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas import FlowRun
    from prefect.client.schemas.responses import DeploymentResponse

POOL = f"redco-flow-{user_name()}"  # no worker of another user starts our processes
_FORMER_POOL = "redco-flow"
MAX_FIRINGS = 10
"""Firings at once if `serve --limit` is not given; the run of each has a process of 110 MiB."""
MISSED_TAG = "missed"
"""The tag of flow runs of missed firings."""

_TAG = "redco-flow-schedule"
_PAGE = 200  # flow runs that the server lists at once
_SLUG = "redco-flow"


@dataclass(frozen=True)
class Deployed:
    """A schedule's deployment on the server.

    Args:
        page: of the deployment.
        is_paused: it does not fire.
        next_firings: when it will, in UTC, at most three.
        when: its schedule, for people.
        parameters: of the flow.
    """

    page: str
    is_paused: bool
    next_firings: list[datetime]
    when: str
    parameters: dict[str, Any]


def connect() -> PrefectApi:
    """Return the API of schedules: the user's own, or our server, started where none runs.

    Raises:
        PrefectServerError: there is none, and none could be started.
    """
    api = api_at(ensure_server())
    prepare_environment(api)
    return api


@contextlib.contextmanager
def client_of(api: PrefectApi) -> Iterator[SyncPrefectClient]:
    """Yield a client of an API that `connect` returned.

    Raises:
        PrefectServerError: the API answers an error, or nothing.
    """
    from httpx import HTTPError, HTTPStatusError
    from prefect.client.orchestration import get_client

    try:
        with api_settings(api), get_client(sync_client=True) as client:
            yield client
    except HTTPStatusError as error:
        code, path = error.response.status_code, error.request.url.path
        remedy = "its log may say why"
        if code in (401, 403):
            remedy = "set PREFECT_API_AUTH_STRING, or PREFECT_API_KEY of Prefect Cloud"
        problem = f"the Prefect API at {api.url} answers {code} to {path}; {remedy}."
        raise PrefectServerError(problem) from error
    except HTTPError as error:
        problem = f"the Prefect API at {api.url} does not answer: {error or type(error).__name__}"
        raise PrefectServerError(problem) from error


def api_settings(api: PrefectApi) -> contextlib.AbstractContextManager[Any]:
    """Return what has Prefect ask this API inside of a `with`.

    Prefect has read its settings when it was imported, and our server may have moved since.
    """
    from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings

    own = {PREFECT_API_URL: api.url, PREFECT_API_AUTH_STRING: api.auth} if api.is_ours else {}
    return temporary_settings(own)


def deploy(schedule: Schedule, workspace: Workspace, client: SyncPrefectClient) -> UUID:
    """Make a schedule's deployment, or make it what the schedule says now; nothing watches it.

    Raises:
        UsageError: the name is that of a schedule of another workspace.
        ValueError: its recurrence rule has no dates.
    """
    from prefect.client.schemas.actions import DeploymentScheduleCreate

    found = find_deployment(schedule.name, client)
    if found is not None and found.parameters.get("workspace") != str(workspace.root):
        raise UsageError(
            f"schedule '{schedule.name}' is one of workspace {found.parameters.get('workspace')}; "
            "choose another name: --name."
        )
    when = DeploymentScheduleCreate(schedule=_prefect_schedule(schedule), slug=_SLUG)
    forget_deleted(prefect_directory(), schedule.name)
    make_pool(client)
    # What it missed, and that it was silent for long, says nothing of what it becomes.
    forget_silence(schedule.name, client)
    if found is not None:
        forget_missed(found.id, client)
    flow_file = find_file("flows", "flows/recurring.py").absolute()
    return client.create_deployment(
        client.create_flow_from_name(FLOW),
        schedule.name,
        schedules=[when],
        paused=schedule.is_paused,
        parameters=_parameters(schedule, workspace),
        parameter_openapi_schema=_parameter_schema(flow_file),
        enforce_parameter_schema=True,
        description=f"`{Path(schedule.pipeline).name}` again and again, {schedule.when}.",
        tags=[_TAG],
        work_pool_name=POOL,
        entrypoint=f"{flow_file}:recurring",
    )


def find_deployment(name: str, client: SyncPrefectClient) -> DeploymentResponse | None:
    """Return a schedule's deployment, or None where the server has none."""
    from prefect.exceptions import ObjectNotFound

    try:
        return client.read_deployment_by_name(f"{FLOW}/{name}")
    except ObjectNotFound:
        return None


def delete_noted(client: SyncPrefectClient) -> None:
    """Delete the deployments of schedules that were deleted while no server answered."""
    for name, workspace in deleted_schedules(prefect_directory()).items():
        directory = ScheduleDirectory.of(Workspace(Path(workspace)), name)
        if (directory.path / "schedule.json").exists():
            continue  # it is being deleted: `restore` would make the deployment again
        found = find_deployment(name, client)
        if found is not None and found.parameters.get("workspace") == workspace:
            forget_silence(name, client)
            client.delete_deployment(found.id)
        forget_deleted(prefect_directory(), name)


def deployments(client: SyncPrefectClient) -> list[DeploymentResponse]:
    """Return the deployments of this user's schedules, of every workspace."""
    from prefect.client.schemas.filters import WorkPoolFilter, WorkPoolFilterName

    ours = WorkPoolFilter(name=WorkPoolFilterName(any_=[POOL]))
    found: list[DeploymentResponse] = []
    while page := client.read_deployments(work_pool_filter=ours, offset=len(found)):
        found += page
    return found


def move_to_pool(found: DeploymentResponse, client: SyncPrefectClient) -> None:
    """Move a deployment of an earlier release to this user's pool."""
    from prefect.client.schemas.actions import DeploymentUpdate

    if found.work_pool_name == _FORMER_POOL:
        client.update_deployment(found.id, DeploymentUpdate(work_pool_name=POOL))


def fires(found: DeploymentResponse) -> bool:
    """Whether a deployment is neither paused nor are all its schedules switched off."""
    return not found.paused and any(one.active for one in found.schedules)


def describe(found: DeploymentResponse, api: PrefectApi) -> Deployed:
    """Return what the server says of a schedule, edited or not."""
    active = [one for one in found.schedules if one.active]
    dates = asyncio.run(_next_dates([one.schedule for one in active]))
    said = "; ".join(_said(one.schedule) for one in active)
    page = f"{ui_url(api.url)}/deployments/deployment/{found.id}"
    is_paused = not fires(found)
    return Deployed(page, is_paused, [] if is_paused else dates, said, dict(found.parameters))


def switch_off_refused(found: DeploymentResponse, client: SyncPrefectClient) -> list[str]:
    """Switch off the schedules that `schedule add` would refuse; return why, one line for each."""
    problems = []
    for one in found.schedules:
        if one.active and (problem := _problem_of(*_words(one.schedule))):
            client.update_deployment_schedule(found.id, one.id, active=False)
            problems.append(f"schedule '{found.name}' is switched off: {problem}")
    return problems


@lru_cache
def _problem_of(key: str, rule: str, timezone: str) -> str:
    try:
        ScheduleSection.from_json({key: rule, "timezone": timezone})
    except ValidationError as error:
        return str(error.errors()[0]["msg"]).removeprefix("Value error, ")
    return ""


def fire_flow_run(
    schedule: str,
    workspace: str,
    pipeline: str,
    profile: str,
    overrides: list[str],
    overlap: str,
    missed: str,
    retries: int,
) -> Firing:
    """Bring the firing that the present flow run is to its end."""
    from prefect.context import get_run_context
    from prefect.logging import get_run_logger

    flow_run = get_run_context().flow_run  # type: ignore[union-attr]
    assert flow_run is not None
    due = flow_run.expected_start_time or datetime.now(UTC)
    folder, zone = _place(ScheduleDirectory.of(Workspace(Path(workspace)), schedule))
    environment = {
        DATE_VARIABLE: due.astimezone(zone).isoformat(),
        TIMEZONE_VARIABLE: zone.key,
        SCHEDULE_VARIABLE: schedule,
    }
    terms = Terms(
        *(schedule, Path(workspace), pipeline, profile, tuple(overrides), overlap, missed, retries),
        folder=folder,
        environment=environment,
    )
    stop = threading.Event()
    watching = watch_for_cancelling(flow_run.id, lambda reason: stop.set())
    log = get_run_logger()
    try:
        firer = Firer(terms, partial(_later_is_due, flow_run), log.info, stop)
        firing = firer.fire(str(flow_run.id), due)
        _rename(flow_run.id, firing.told)
        return firing
    finally:
        watching.set()


def _place(directory: ScheduleDirectory) -> tuple[Path, ZoneInfo]:
    """Return where a schedule's commands run, and the zone of its dates."""
    try:
        schedule = directory.read()
    except (FileNotFoundError, DamagedRecord):
        return Path.cwd(), ZoneInfo("UTC")
    return Path(schedule.directory), ZoneInfo(schedule.timezone)


def _later_is_due(flow_run: FlowRun) -> bool:
    """Whether another flow run of the same deployment was due after this one, and is by now."""
    from prefect.client.orchestration import get_client

    due = flow_run.expected_start_time
    if flow_run.deployment_id is None or due is None:
        return False
    with get_client(sync_client=True) as client:
        dates = due_dates(flow_run.deployment_id, due, datetime.now(UTC), client)
    return any(date > due for date in dates)


def due_dates(
    deployment: UUID, first: datetime, last: datetime, client: SyncPrefectClient
) -> set[datetime]:
    """Return when a deployment's flow runs were due, whatever became of them, in a period."""
    from prefect.client.schemas.filters import FlowRunFilterExpectedStartTime

    period = FlowRunFilterExpectedStartTime(after_=first, before_=last)
    found = read_flow_runs([deployment], client, expected_start_time=period)
    return {one.expected_start_time for one in found if one.expected_start_time}


def forget_missed(deployment: UUID, client: SyncPrefectClient) -> None:
    """Delete the flow runs of missed firings that have not begun."""
    from prefect.client.schemas.filters import FlowRunFilterTags

    tagged = FlowRunFilterTags(all_=[MISSED_TAG])
    for one in read_flow_runs([deployment], client, ["SCHEDULED"], tags=tagged):
        if one.run_count == 0:
            client.delete_flow_run(one.id)


def read_flow_runs(
    of_deployments: list[UUID],
    client: SyncPrefectClient,
    state_types: Iterable[str] = (),
    *,
    sort: Any = None,
    **chosen: Any,
) -> list[FlowRun]:
    """Return flow runs of deployments.

    Args:
        state_types: those of their states; any, if empty.
        chosen: further fields of Prefect's `FlowRunFilter`.
    """
    from prefect.client.schemas.filters import (
        DeploymentFilter,
        DeploymentFilterId,
        FlowRunFilter,
        FlowRunFilterState,
        FlowRunFilterStateType,
    )
    from prefect.client.schemas.objects import StateType

    if state_types:
        types = FlowRunFilterStateType(any_=[StateType(one) for one in state_types])
        chosen["state"] = FlowRunFilterState(type=types)
    found: list[FlowRun] = []
    while True:
        page = client.read_flow_runs(
            flow_run_filter=FlowRunFilter(**chosen),
            deployment_filter=DeploymentFilter(id=DeploymentFilterId(any_=of_deployments)),
            sort=sort,
            limit=_PAGE,
            offset=len(found),
        )
        found += page
        if len(page) < _PAGE:
            return found


def _rename(flow_run_id: UUID, name: str) -> None:
    """Have lists of flow runs tell what came of one."""
    from prefect.client.orchestration import get_client

    with contextlib.suppress(Exception), get_client(sync_client=True) as client:  # it is a view
        client.update_flow_run(flow_run_id, name=name)


def make_pool(client: SyncPrefectClient, limit: int | None = None) -> None:
    """Create the work pool of this user's firings, or set its limit.

    Args:
        limit: firings at once; None: as it is, or `MAX_FIRINGS`.
    """
    from prefect.client.schemas.actions import WorkPoolCreate, WorkPoolUpdate
    from prefect.exceptions import ObjectNotFound
    from prefect.workers.process import ProcessWorker

    try:
        found = client.read_work_pool(POOL)
    except ObjectNotFound:
        template = ProcessWorker.get_default_base_job_template()
        pool = WorkPoolCreate(
            name=POOL,
            type="process",
            base_job_template=template,
            concurrency_limit=limit or MAX_FIRINGS,
        )
        client.create_work_pool(pool, overwrite=True)
    else:
        if limit is not None and found.concurrency_limit != limit:
            client.update_work_pool(POOL, WorkPoolUpdate(concurrency_limit=limit))


def _parameter_schema(path: Path) -> dict[str, Any]:
    """The flow's parameters, by which the server checks what people edit."""
    from prefect.flows import load_flow_from_entrypoint
    from prefect.utilities.callables import parameter_schema

    flow: Any = load_flow_from_entrypoint(f"{path}:recurring")
    # The deployment gives them all; for required ones "Quick run" would ask again.
    return parameter_schema(flow).model_dump_for_openapi() | {"required": []}


def _parameters(schedule: Schedule, workspace: Workspace) -> dict[str, Any]:
    return {
        "schedule": schedule.name,
        "workspace": str(workspace.root),
        "pipeline": schedule.pipeline,
        "profile": schedule.profile,
        "overrides": schedule.overrides,
        "overlap": schedule.overlap,
        "missed": schedule.missed,
        "retries": schedule.retries,
    }


def _prefect_schedule(schedule: Schedule) -> Any:
    from prefect.client.schemas.schedules import CronSchedule, IntervalSchedule, RRuleSchedule

    if schedule.every:
        # Counted from now, so that an update does not fire at once.
        anchor = datetime.now(UTC)
        return IntervalSchedule(interval=interval_of(schedule.every), anchor_date=anchor)
    if schedule.cron:
        return CronSchedule(cron=schedule.cron, timezone=schedule.timezone)
    # Checked again: an earlier release may have written the record.
    rule = checked_rule(schedule.rrule, schedule.timezone)
    return RRuleSchedule(rrule=rule, timezone=schedule.timezone)


async def _next_dates(schedules: list[Any]) -> list[datetime]:
    found = [date for one in schedules for date in await _dates_of(one)]
    return sorted(date.astimezone(UTC) for date in found)[:3]


async def _dates_of(schedule: Any) -> list[datetime]:
    if (rule := getattr(schedule, "rrule", None)) is not None:
        return next_dates(rule, schedule.timezone or "UTC")
    dates: list[datetime] = await on_server(schedule).get_dates(3, datetime.now(UTC))
    return dates


def on_server(schedule: Any) -> Any:
    """Return a schedule as the server has it, which computes its dates."""
    from prefect.server.schemas import schedules

    return getattr(schedules, type(schedule).__name__)(**schedule.model_dump())


def _words(schedule: Any) -> tuple[str, str, str]:
    """Return the key of a schedule on the server, its rule, and its timezone."""
    for key in ("cron", "rrule"):
        if (rule := getattr(schedule, key, None)) is not None:
            return key, rule, schedule.timezone or "UTC"
    return "every", interval_text(schedule.interval), schedule.timezone or "UTC"


def _said(schedule: Any) -> str:
    key, rule, timezone = _words(schedule)
    return f"every {rule}" if key == "every" else f"{' '.join(rule.split())} {timezone}"
