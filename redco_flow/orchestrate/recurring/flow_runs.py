"""Bring the flow runs of schedules to their end: each that is due runs in a thread of this process.

A flow run that no thread has is settled by the record of its firing: one that has ended is closed
on the server, one that was cancelled on its page ends its run, any other is scheduled again.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

from redco_flow.errors import RedcoFlowError
from redco_flow.orchestrate.prefect.api import PrefectApi
from redco_flow.orchestrate.recurring.deployments import (
    MAX_FIRINGS,
    POOL,
    api_settings,
    deployments,
    switch_off_refused,
)
from redco_flow.orchestrate.recurring.firing import leave, new_firing, note_end_of
from redco_flow.orchestrate.recurring.missed import make_up
from redco_flow.orchestrate.recurring.silence import watch_only_while
from redco_flow.orchestrate.run.cancel import Log
from redco_flow.spec.find import find_file
from redco_flow.tracking.schedules import Firing, FiringState, ScheduleDirectory
from redco_flow.tracking.typed_records import unless_damaged
from redco_flow.tracking.workspace import Workspace

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas import FlowRun, State
    from prefect.client.schemas.responses import DeploymentResponse

SECONDS_BETWEEN_LOOKS = 5.0
_SECONDS_TO_BEGIN = 60.0  # from a flow run's being taken on another machine to its record
_MOST_BEGINNINGS = 20
_REFUSED = (400, 409, 422)  # what the server answers to one request that is wrong
_LONG_AGO = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True)
class _Thread:
    """A flow run's thread, and the server that it reports to."""

    thread: threading.Thread
    url: str


class FlowRuns:
    """The flow runs that this process has, each in a thread.

    Args:
        log: takes lines for the log of `redco-flow serve`.
        limit: firings at once; the others wait on the server.
    """

    def __init__(self, log: Log, limit: int = MAX_FIRINGS) -> None:
        self._log = log
        self._limit = limit
        self._threads: dict[str, _Thread] = {}
        self._said: set[str] = set()

    def attend(
        self, client: SyncPrefectClient, api: PrefectApi, missed_since: datetime | None = None
    ) -> None:
        """Settle what no thread has, then begin what is due.

        Args:
            missed_since: nothing served from then on; what came due is made up for.
        """
        interval = SECONDS_BETWEEN_LOOKS
        client.send_worker_heartbeat(POOL, _own_name(), heartbeat_interval_seconds=interval)
        # What a worker asks: by that the server shows pool and deployments as ready.
        client.get_scheduled_flow_runs_for_work_pool(POOL, scheduled_before=_LONG_AGO)
        own = self.settle(client, api.url)
        if missed_since is not None:
            for one in own.values():
                with self.said_once(f"missed firings of schedule '{one.name}'"):
                    make_up(_directory_of(one), one.id, client, missed_since)
        room = self._limit - len(self._threads)
        taken = []
        for flow_run in _due(list(own), client, room) if own and room > 0 else ():
            deployment = own.get(flow_run.deployment_id)
            if deployment is None or self._has(str(flow_run.id)):  # its thread is about to end
                continue
            if _take(flow_run, client):
                # Before any begins, so that each sees those that were due before it.
                with self.said_once(f"firing {flow_run.id} of schedule '{deployment.name}'"):
                    due = flow_run.expected_start_time or datetime.now(UTC)
                    _directory_of(deployment).claim(new_firing(str(flow_run.id), due))
                taken.append((flow_run.id, str(deployment.entrypoint)))
        for key, entrypoint in taken:
            self._begin(client.read_flow_run(key), entrypoint, api)

    def settle(
        self, client: SyncPrefectClient, url: str = ""
    ) -> dict[UUID | None, DeploymentResponse]:
        """End or reschedule every firing that no thread has.

        Args:
            url: of the API; the end of a thread that reports to another one is not waited for.

        Returns:
            this machine's deployments, by id.
        """
        self._threads = {key: one for key, one in self._threads.items() if one.thread.is_alive()}
        is_shared = _has_other_machines(client)
        own: dict[UUID | None, DeploymentResponse] = {}
        found = deployments(client)
        flow_runs = _open_flow_runs([one.id for one in found], client)
        for deployment in found:
            # One schedule whose records are damaged must not keep the others from firing.
            with self.said_once(f"schedule '{deployment.name}'"):
                directory = _directory_of(deployment)
                if not (directory.path / "schedule.json").exists():
                    continue  # of another machine, or its workspace was deleted
                own[deployment.id] = deployment
                its_own = [one for one in flow_runs if one.deployment_id == deployment.id]
                self._settle_deployment(
                    directory, deployment, its_own, client, url, is_shared=is_shared
                )
        return own

    def _settle_deployment(
        self,
        directory: ScheduleDirectory,
        deployment: DeploymentResponse,
        open_flow_runs: list[FlowRun],
        client: SyncPrefectClient,
        url: str,
        *,
        is_shared: bool,
    ) -> None:
        problems = switch_off_refused(deployment, client)
        for problem in problems:
            self._log(f"warning: {problem}")
        num_active = sum(bool(one.active) for one in deployment.schedules) - len(problems)
        fires = not deployment.paused and num_active > 0
        schedule = unless_damaged(directory.read)
        if schedule is not None and schedule.no_run_for:
            watch_only_while(directory.name, client, fires=fires)
        firings = {one.id: one for one in directory.firings()}
        flow_runs = {str(one.id): one for one in open_flow_runs}
        for key, flow_run in flow_runs.items():
            has_ended = key in firings and firings[key].has_ended
            if has_ended and key in self._threads and self._threads[key].url != url:
                del self._threads[key]  # what it reports to is gone
            if not self._has(key):
                with self.said_once(f"firing {key} of schedule '{directory.name}'"):
                    self._settle(directory, flow_run, client, is_shared=is_shared)
        for firing in firings.values():
            if firing.id not in flow_runs and not firing.has_ended:
                with self.said_once(f"firing {firing.id} of schedule '{directory.name}'"):
                    self._note_end(directory, firing, client)

    @contextlib.contextmanager
    def said_once(self, what: str) -> Iterator[None]:
        """Log an error, once, and go on; one of the server's ends this look."""
        from httpx import HTTPStatusError

        try:
            yield
        except (RedcoFlowError, OSError, ValueError, HTTPStatusError) as error:
            if isinstance(error, HTTPStatusError) and error.response.status_code not in _REFUSED:
                raise
            if (line := f"warning: {what}: {error}") not in self._said:
                self._said.add(line)
                self._log(line)

    def _has(self, flow_run: str) -> bool:
        return flow_run in self._threads and self._threads[flow_run].thread.is_alive()

    def _is_at_work(self, firing: Firing) -> bool:
        """Whether a thread here, or a process of another machine, brings it to its end."""
        return self._has(firing.id) or (firing.is_held and not firing.is_of_this_process)

    def _note_end(
        self, directory: ScheduleDirectory, firing: Firing, client: SyncPrefectClient
    ) -> None:
        """End a firing whose flow run is closed: its thread ended by an error."""
        present = directory.find_firing(firing.id)
        if present is None or present.has_ended or self._is_at_work(present):
            return
        if present.has_started_run:
            note_end_of(directory, present)
        elif present.is_of_this_process and not _is_open(firing.id, client):
            why = "it was interrupted before it started a run"
            directory.end_firing(present, FiringState.FAILED, why)

    def _settle(
        self,
        directory: ScheduleDirectory,
        flow_run: FlowRun,
        client: SyncPrefectClient,
        *,
        is_shared: bool,
    ) -> None:
        firing = unless_damaged(lambda: directory.find_firing(str(flow_run.id)))
        retries = int(flow_run.parameters.get("retries") or 0)
        if firing is not None and not firing.has_ended and self._is_at_work(firing):
            return
        state = client.read_flow_run(flow_run.id).state
        if state is None or flow_run.state is None or state.id != flow_run.state.id:
            return  # something happened to it since the flow runs were listed
        if state.is_cancelling():
            leave(directory, str(flow_run.id))
            _tell_end(flow_run, directory.find_firing(str(flow_run.id)), client)
        elif (
            firing is not None
            and not _is_retry(state, firing)
            and (ended := firing if firing.has_ended else note_end_of(directory, firing, retries))
        ):
            _tell_end(flow_run, ended, client)
        elif not is_shared or _age_of(state) > _SECONDS_TO_BEGIN:
            self._schedule_again(flow_run, client)

    def _schedule_again(self, flow_run: FlowRun, client: SyncPrefectClient) -> None:
        from prefect.states import Crashed, Scheduled

        if flow_run.run_count >= _MOST_BEGINNINGS:
            state: State[Any] = Crashed(message=f"it was interrupted {flow_run.run_count} times.")
        else:
            self._log(f"firing {flow_run.id} of {flow_run.expected_start_time} is continued")
            # Before those that became due meanwhile: it may have a run at work.
            due = flow_run.expected_start_time
            state = Scheduled(scheduled_time=due, message="it was interrupted; it is continued")
        client.set_flow_run_state(flow_run.id, state, force=True)

    def _begin(self, flow_run: FlowRun, entrypoint: str, api: PrefectApi) -> None:
        """Run the flow in a thread; what ends without an end is settled at the next look."""

        def run() -> None:
            from prefect.flow_engine import run_flow

            try:
                with api_settings(api):
                    if (flow := self._load(flow_run, entrypoint)) is None:
                        return
                    given = flow_run.parameters
                    run_flow(flow, flow_run=flow_run, parameters=given, return_type="state")
            except BaseException as error:  # noqa: BLE001 (the others go on)
                self._log(f"warning: firing {flow_run.id} was interrupted: {error!r}")

        thread = threading.Thread(target=run, name=f"firing {flow_run.id}", daemon=True)
        self._threads[str(flow_run.id)] = _Thread(thread, api.url)
        thread.start()

    def _load(self, flow_run: FlowRun, entrypoint: str) -> Any:
        """Return the deployment's flow; None where it cannot be loaded: its page says why."""
        from prefect.client.orchestration import get_client
        from prefect.flows import load_flow_from_entrypoint
        from prefect.states import Failed

        file, _, name = entrypoint.rpartition(":")
        if not Path(file).exists():  # of an environment that was moved
            entrypoint = f"{find_file('flows', 'flows/recurring.py').absolute()}:{name}"
        try:
            return load_flow_from_entrypoint(entrypoint)
        except Exception as error:  # noqa: BLE001 (the user's own file may raise anything)
            message = f"the flow {entrypoint} cannot be loaded: {error!r}"
            self._log(f"warning: firing {flow_run.id}: {message}")
            with get_client(sync_client=True) as client:
                client.set_flow_run_state(flow_run.id, Failed(message=message), force=True)
            return None


def _directory_of(deployment: DeploymentResponse) -> ScheduleDirectory:
    workspace = Workspace(Path(str(deployment.parameters.get("workspace"))))
    return ScheduleDirectory.of(workspace, str(deployment.parameters.get("schedule")))


def _due(own: list[Any], client: SyncPrefectClient, limit: int) -> list[FlowRun]:
    """Return flow runs of these deployments that are due, the oldest first.

    The server's query for workers counts the pool's free places, which flow runs that no machine
    takes would fill.
    """
    from prefect.client.schemas.filters import FlowRunFilterNextScheduledStartTime
    from prefect.client.schemas.sorting import FlowRunSort

    due = FlowRunFilterNextScheduledStartTime(before_=datetime.now(UTC))
    first = FlowRunSort.NEXT_SCHEDULED_START_TIME_ASC
    return _read(client, own, ["SCHEDULED"], sort=first, limit=limit, next_scheduled_start_time=due)


def _read(
    client: SyncPrefectClient,
    of_deployments: list[Any],
    state_types: list[str],
    *,
    sort: Any = None,
    limit: int = 200,
    offset: int = 0,
    **chosen: Any,
) -> list[FlowRun]:
    """Return flow runs of deployments in states of these types.

    Args:
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

    types = FlowRunFilterStateType(any_=[StateType(one) for one in state_types])
    return client.read_flow_runs(
        flow_run_filter=FlowRunFilter(state=FlowRunFilterState(type=types), **chosen),
        deployment_filter=DeploymentFilter(id=DeploymentFilterId(any_=of_deployments)),
        sort=sort,
        limit=limit,
        offset=offset,
    )


def _take(flow_run: FlowRun, client: SyncPrefectClient) -> bool:
    """Take a flow run that is due, unless another machine has been faster."""
    from prefect.client.schemas.responses import SetStateStatus
    from prefect.states import Pending

    return client.set_flow_run_state(flow_run.id, Pending()).status == SetStateStatus.ACCEPT


def _is_retry(state: State[Any], firing: Firing) -> bool:
    """Whether a flow run was continued on its page after its firing's end."""
    if not firing.has_ended or state.is_crashed():
        return False
    return bool(state.timestamp > datetime.fromisoformat(firing.ended))


def _has_other_machines(client: SyncPrefectClient) -> bool:
    """Whether another machine takes flow runs of the pool, too."""
    workers = client.read_workers_for_work_pool(POOL)
    return any(one.status == "ONLINE" and one.name != _own_name() for one in workers)


def _own_name() -> str:
    return f"redco-flow on {os.uname().nodename}"


def _tell_end(flow_run: FlowRun, firing: Firing | None, client: SyncPrefectClient) -> None:
    from prefect.states import Cancelled, Completed, Failed

    kinds: dict[str, Any] = {"completed": Completed, "failed": Failed, "skipped": Completed}
    message = firing.told if firing is not None else ""
    end = kinds.get(firing.state if firing is not None else "", Cancelled)(message=message)
    client.set_flow_run_state(flow_run.id, end, force=True)


def _is_open(flow_run: str, client: SyncPrefectClient) -> bool:
    """Whether a flow run that a list lacks has no end: one that ends moves the pages behind it."""
    from prefect.exceptions import ObjectNotFound

    try:
        state = client.read_flow_run(UUID(flow_run)).state
    except ObjectNotFound:
        return False
    return state is None or not state.is_final() or state.is_crashed()


def _age_of(state: State[Any]) -> float:
    return float((datetime.now(UTC) - state.timestamp).total_seconds())


def _open_flow_runs(of_deployments: list[Any], client: SyncPrefectClient) -> list[FlowRun]:
    """Return the deployments' flow runs that have begun and have no good end."""
    from prefect.client.schemas.filters import FlowRunFilterExpectedStartTime

    types = ["PENDING", "RUNNING", "CANCELLING", "CRASHED"]
    recent = FlowRunFilterExpectedStartTime(after_=datetime.now(UTC) - timedelta(days=30))
    found: list[FlowRun] = []
    while of_deployments and (
        page := _read(client, of_deployments, types, offset=len(found), expected_start_time=recent)
    ):
        found += page
    # One that died for good is crashed as often as it began.
    return [
        one
        for one in found
        if not (one.state and one.state.is_crashed() and one.run_count >= _MOST_BEGINNINGS)
    ]
