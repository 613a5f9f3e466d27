"""Bring the flow runs of schedules to their end: each that is due runs in a thread of this process.

A flow run that no thread has is settled by the record of its firing: one that has ended is closed
on the server, one that was cancelled on its page ends its run, any other is scheduled again.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

from redco_flow.errors import RedcoFlowError
from redco_flow.orchestrate.prefect.api import PrefectApi
from redco_flow.orchestrate.recurring.deployments import (
    MAX_FIRINGS,
    MISSED_TAG,
    POOL,
    api_settings,
    deployments,
    fires,
    read_flow_runs,
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
    from prefect.client.schemas import FlowRun, OrchestrationResult, State
    from prefect.client.schemas.responses import DeploymentResponse

SECONDS_BETWEEN_LOOKS = 5.0
_SECONDS_TO_BEGIN = 60.0  # from a flow run's being taken on another machine to its record
_MOST_BEGINNINGS = 20
_MOST_OF_ONE = 3  # threads of one deployment: one runs, one waits, one is to be skipped
_REFUSED = (400, 409, 422)  # what the server answers to one request that is wrong
_LONG_AGO = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True)
class _Thread:
    """A flow run's thread, the server that it reports to, and its deployment."""

    thread: threading.Thread
    url: str
    deployment: UUID | None


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
        self._missed_since: dict[UUID, datetime] = {}  # of deployments not made up for yet
        self._begun: set[str] = set()  # firings on record that have no end

    def attend(
        self,
        client: SyncPrefectClient,
        api: PrefectApi,
        missed_since: datetime | None = None,
        found: list[DeploymentResponse] | None = None,
    ) -> None:
        """Settle what no thread has, then begin what is due.

        Args:
            missed_since: nothing served from then on; what came due is made up for.
            found: as of `settle`.
        """
        interval = SECONDS_BETWEEN_LOOKS
        client.send_worker_heartbeat(POOL, _own_name(), heartbeat_interval_seconds=interval)
        # What a worker asks: by that the server shows pool and deployments as ready.
        client.get_scheduled_flow_runs_for_work_pool(POOL, scheduled_before=_LONG_AGO)
        own = self.settle(client, api.url, found)
        self._make_up(own, client, missed_since)
        room = self._limit - len(self._threads)
        if own and room > 0:
            self._begin_due(own, room, client, api)

    def _make_up(
        self,
        own: dict[UUID, DeploymentResponse],
        client: SyncPrefectClient,
        missed_since: datetime | None,
    ) -> None:
        """Make up for what was missed; at each look again until that worked for a deployment."""
        if missed_since is not None:
            for one in deployments(client):
                self._missed_since.setdefault(one.id, missed_since)
        for key in own.keys() & self._missed_since.keys():
            with self.said_once(f"missed firings of schedule '{own[key].name}'"):
                make_up(_directory_of(own[key]), key, client, self._missed_since[key])
                del self._missed_since[key]

    def _begin_due(
        self,
        own: dict[UUID, DeploymentResponse],
        room: int,
        client: SyncPrefectClient,
        api: PrefectApi,
    ) -> None:
        """Begin flow runs that are due, but few of one deployment, so that others have places."""
        numbers = Counter(one.deployment for one in self._threads.values())
        taken: list[tuple[FlowRun, str]] = []
        try:
            for flow_run in _due(list(own), client):
                key = flow_run.deployment_id
                if len(taken) == room:
                    break
                if key is None or self._has(str(flow_run.id)):  # its thread is about to end
                    continue
                is_missed = MISSED_TAG in flow_run.tags
                if is_missed and flow_run.run_count == 0 and not fires(own[key]):
                    client.delete_flow_run(flow_run.id)
                    continue
                most = 1 if is_missed else _MOST_OF_ONE
                if numbers[key] >= most and str(flow_run.id) not in self._begun:
                    numbers[key] = _MOST_OF_ONE  # those that were due later wait, too
                elif _take(flow_run, client):
                    numbers[key] += 1
                    # Before any begins, so that each sees those that were due before it.
                    if self._claim(flow_run, own[key]):
                        taken.append((flow_run, str(own[key].entrypoint)))
        finally:
            for flow_run, entrypoint in taken:
                self._begin(flow_run, entrypoint, api)

    def _claim(self, flow_run: FlowRun, deployment: DeploymentResponse) -> bool:
        """Make the record of a firing; return False if another process has the firing."""
        with self.said_once(f"firing {flow_run.id} of schedule '{deployment.name}'"):
            directory, due = _directory_of(deployment), flow_run.expected_start_time
            new = new_firing(str(flow_run.id), due or datetime.now(UTC))
            if directory.claim(new)[0] is None:
                present = directory.find_firing(new.id)
                return present is None or present.has_ended
        return True

    def settle(
        self,
        client: SyncPrefectClient,
        url: str = "",
        found: list[DeploymentResponse] | None = None,
    ) -> dict[UUID, DeploymentResponse]:
        """End or reschedule every firing that no thread has.

        Args:
            url: of the API; the end of a thread that reports to another one is not waited for.
            found: the deployments of this user's schedules; None: they are listed.

        Returns:
            this machine's deployments, by id.
        """
        self._threads = {key: one for key, one in self._threads.items() if one.thread.is_alive()}
        is_shared = _has_other_machines(client)
        self._begun = set()
        own: dict[UUID, DeploymentResponse] = {}
        found = deployments(client) if found is None else found
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
        does_fire = not deployment.paused and num_active > 0
        schedule = unless_damaged(directory.read)
        if schedule is not None and schedule.no_run_for:
            watch_only_while(directory.name, client, fires=does_fire)
        firings = {one.id: one for one in directory.firings()}
        self._begun.update(key for key, one in firings.items() if not one.has_ended)
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
        self._threads[str(flow_run.id)] = _Thread(thread, api.url, flow_run.deployment_id)
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


def _due(own: list[UUID], client: SyncPrefectClient) -> list[FlowRun]:
    """Return flow runs of these deployments that are due, the oldest first.

    The server's query for workers counts the pool's free places, which flow runs that no machine
    takes would fill.
    """
    from prefect.client.schemas.filters import FlowRunFilterNextScheduledStartTime
    from prefect.client.schemas.sorting import FlowRunSort

    due = FlowRunFilterNextScheduledStartTime(before_=datetime.now(UTC))
    first = FlowRunSort.NEXT_SCHEDULED_START_TIME_ASC
    return read_flow_runs(own, client, ["SCHEDULED"], sort=first, next_scheduled_start_time=due)


def _take(flow_run: FlowRun, client: SyncPrefectClient) -> bool:
    """Take a flow run that is due, unless another machine has been faster; note its state."""
    from prefect.client.schemas.responses import SetStateStatus
    from prefect.states import Pending

    taken: OrchestrationResult[Any] = client.set_flow_run_state(flow_run.id, Pending())
    flow_run.state = taken.state
    return taken.status == SetStateStatus.ACCEPT


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
        found = client.read_flow_run(UUID(flow_run))
    except ObjectNotFound:
        return False
    state = found.state
    return state is None or not state.is_final() or (state.is_crashed() and not _is_dead(found))


def _age_of(state: State[Any]) -> float:
    return float((datetime.now(UTC) - state.timestamp).total_seconds())


def _open_flow_runs(of_deployments: list[UUID], client: SyncPrefectClient) -> list[FlowRun]:
    """Return the deployments' flow runs that have begun and have no good end."""
    if not of_deployments:
        return []
    types = ("PENDING", "RUNNING", "CANCELLING", "CRASHED")
    found = read_flow_runs(of_deployments, client, types)
    return [one for one in found if not _is_dead(one)]


def _is_dead(flow_run: FlowRun) -> bool:
    """Whether a flow run died for good: it crashed as often as it may begin."""
    is_crashed = flow_run.state is not None and flow_run.state.is_crashed()
    return is_crashed and flow_run.run_count >= _MOST_BEGINNINGS
