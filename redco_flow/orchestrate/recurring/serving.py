"""Keep the Prefect server, Prefect's worker and all firings alive, for `redco-flow serve`.

`redco-flow serve` runs `serve` in the foreground or detached. It has no clock of its own: Prefect
schedules, its worker starts firings. Interrupted firings are found by their records:
a flow run that has neither a process nor an end is rescheduled, and continues.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from redco_flow.errors import RedcoFlowError, UsageError
from redco_flow.launch.processes import die_with_parent
from redco_flow.orchestrate.prefect.report import refuse_retries
from redco_flow.orchestrate.prefect.server import prefect_directory
from redco_flow.orchestrate.recurring.deployments import (
    MAX_FIRINGS,
    POOL,
    client_of,
    connect,
    delete_noted,
    deploy,
    deployments,
    find_deployment,
    make_pool,
    move_to_pool,
    switch_off_refused,
)
from redco_flow.orchestrate.recurring.firing import SECONDS_LATE, leave, note_end_of
from redco_flow.orchestrate.recurring.serving_record import (
    Serving,
    known_workspaces,
    lock_path,
    note_serving,
)
from redco_flow.orchestrate.recurring.silence import watch_only_while
from redco_flow.records import open_no_link
from redco_flow.tracking.file_lock import LockRequest
from redco_flow.tracking.process_identity import ProcessIdentity
from redco_flow.tracking.schedules import Firing, ScheduleDirectory, list_schedules
from redco_flow.tracking.typed_records import unless_damaged
from redco_flow.tracking.workspace import Workspace

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas import FlowRun, State

_SECONDS_BETWEEN_LOOKS = 5.0
_SECONDS_TO_SPAWN = 5.0  # from a worker's taking a flow run to its process
_SECONDS_TO_BEGIN = 60.0  # from a worker's taking a flow run to its record, on another machine
_SECONDS_TO_END = 20.0
_SECONDS_TO_CANCEL = (
    60.0  # from a firing's being cancelled to what Prefect's worker then says of it
)
_MOST_BEGINNINGS = 20
_SECONDS_TO_START = 120.0

Log = Callable[[str], None]


def serve(log: Log, stop: threading.Event, limit: int = MAX_FIRINGS) -> None:
    """Serve until told to stop.

    Args:
        limit: firings that have a process at once; the others wait at the Prefect server.

    Raises:
        UsageError: another process serves.
    """
    with _only_one():
        note_serving()
        worker: _Worker | None = None
        looked = _Moment.now()
        try:
            while not stop.is_set():
                try:
                    worker = _attend(worker, log, limit)
                    looked = _note_pause(looked)
                except Exception as error:  # noqa: BLE001 (a server that restarts; told and tried again)
                    log(f"warning: {error}; tried again in {_SECONDS_BETWEEN_LOOKS:.0f} s")
                stop.wait(_SECONDS_BETWEEN_LOOKS)
        finally:
            if worker is not None:
                worker.end()


@dataclass(frozen=True)
class _Moment:
    """A moment by the machine's clock, which people set, and by one that counts its sleep, too."""

    clock: float
    since_boot: float

    @classmethod
    def now(cls) -> _Moment:
        return cls(time.time(), time.clock_gettime(time.CLOCK_BOOTTIME))


def _note_pause(looked: _Moment) -> _Moment:
    """Have it on record that what was due since the last look was missed, if that is long ago."""
    now = _Moment.now()
    if max(now.clock - looked.clock, now.since_boot - looked.since_boot) > SECONDS_LATE:
        note_serving()
    return now


def start_detached(limit: int = MAX_FIRINGS) -> ProcessIdentity:
    """Start `redco-flow serve` as a process of its own; return it once it serves.

    Raises:
        UsageError: another process serves.
        RedcoFlowError: it did not start; names its log.
    """
    if (serving := Serving.find()) is not None:
        raise UsageError(f"schedules are served already, by {serving.process}.")
    log = prefect_directory() / "serve.log"
    command = [sys.executable, "-P", "-m", "redco_flow.cli.main", "serve"]
    command += ["--limit", str(limit)]
    with open(log, "ab", opener=open_no_link) as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    deadline = time.monotonic() + _SECONDS_TO_START
    while time.monotonic() < deadline and process.poll() is None:
        serving = Serving.find()
        if serving is not None and serving.process.pid == process.pid:
            process.returncode = 0  # its end does not matter here
            return serving.process
        time.sleep(0.1)
    raise RedcoFlowError(f"what serves schedules could not be started; see {log}.")


def stop_serving() -> bool:
    """End the process that serves; return whether there was one. Firings that run are left.

    Raises:
        UsageError: it is a process of another host.
    """
    serving = Serving.find()
    if serving is None:
        return False
    if serving.is_elsewhere:
        raise UsageError(f"schedules are served by {serving.process}: end it on that host.")
    os.kill(serving.process.pid, signal.SIGTERM)
    deadline = time.monotonic() + 2 * _SECONDS_TO_END
    while serving.process.is_alive() and time.monotonic() < deadline:
        time.sleep(0.1)
    return True


def _attend(worker: _Worker | None, log: Log, limit: int) -> _Worker:
    """See that the server, the deployments and the worker are there, and settle firings."""
    api = connect()
    with client_of(api) as client:
        delete_noted(client)
        refuse_retries(client)
        make_pool(client, limit)
        for root in known_workspaces():
            for name in restore(Workspace(Path(root)), client, log):
                log(f"the server had no deployment of schedule '{name}': it is created again")
        if worker is not None and (why := worker.why_not(api.url)):
            log(f"{why}; another worker is started")
            worker.end()
            worker = None
        if worker is None:
            worker = _Worker.start(api.url, limit)
            log(f"serving schedules of {api.url}, by worker process {worker.process.pid}")
        settle(client, log)
    return worker


def settle(client: SyncPrefectClient, log: Log) -> None:
    """End or reschedule every firing that no process owns."""
    is_shared = _has_other_workers(client)
    for deployment in deployments(client):
        workspace = Workspace(Path(str(deployment.parameters.get("workspace"))))
        directory = ScheduleDirectory.of(workspace, str(deployment.parameters.get("schedule")))
        if not (directory.path / "schedule.json").exists():
            continue  # of another machine, or its workspace was deleted
        problems = switch_off_refused(deployment, client)
        for problem in problems:
            log(f"warning: {problem}")
        num_active = sum(bool(one.active) for one in deployment.schedules) - len(problems)
        fires = not deployment.paused and num_active > 0
        watch_only_while(directory.name, client, fires=fires)
        flow_runs = {str(one.id): one for one in _open_flow_runs(deployment.id, client)}
        for flow_run in flow_runs.values():
            _settle_flow_run(directory, flow_run, client, log, is_shared=is_shared)
        for firing in directory.firings():
            if firing.id not in flow_runs and not firing.has_ended and not firing.is_held:
                note_end_of(directory, firing)


def restore(workspace: Workspace, client: SyncPrefectClient, log: Log) -> list[str]:
    """Make the deployments that a workspace's schedules lack on the server; return their names."""
    made = []
    for directory in list_schedules(workspace):
        schedule = unless_damaged(directory.read)
        if schedule is None:
            continue
        if (found := find_deployment(schedule.name, client)) is not None:
            move_to_pool(found, client)
        else:
            try:
                deploy(schedule, workspace, client)
            except ValueError as error:  # a rule without dates, of an earlier release
                log(f"warning: schedule '{schedule.name}' cannot fire: {error}")
                continue
            made.append(schedule.name)
    return made


def _settle_flow_run(
    directory: ScheduleDirectory,
    flow_run: FlowRun,
    client: SyncPrefectClient,
    log: Log,
    *,
    is_shared: bool,
) -> None:
    firing = unless_damaged(lambda: directory.find_firing(str(flow_run.id)))
    if firing is not None and firing.is_held:
        return
    state = client.read_flow_run(flow_run.id).state
    if state is None or flow_run.state is None or state.id != flow_run.state.id:
        return  # something happened to it since the flow runs were listed
    if state.is_cancelling():
        leave(directory, str(flow_run.id))
        # A user who sees it cancelled may retry it, which what the worker says later must not undo.
        if _age_of(state) > _SECONDS_TO_CANCEL:
            _tell_end(flow_run, directory.find_firing(str(flow_run.id)), client)
    elif (
        firing is not None
        and not _is_retry(state, firing)
        and (ended := firing if firing.has_ended else note_end_of(directory, firing))
    ):
        _tell_end(flow_run, ended, client)
    elif _has_no_process(flow_run, is_shared=is_shared):
        _schedule_again(flow_run, client, log)


def _is_retry(state: State[Any], firing: Firing) -> bool:
    """Whether a flow run was continued after its firing's end, by a process that still starts."""
    if not firing.has_ended or state.is_crashed():
        return False
    return bool(state.timestamp > datetime.fromisoformat(firing.ended))


def _has_no_process(flow_run: FlowRun, *, is_shared: bool) -> bool:
    """Whether the process that was to begin a firing, or to take it up, is gone or never was.

    Args:
        is_shared: workers of other machines may have taken it, whose processes are not seen here.
    """
    assert flow_run.state is not None
    if is_shared:
        return _age_of(flow_run.state) > _SECONDS_TO_BEGIN
    return _age_of(flow_run.state) > _SECONDS_TO_SPAWN and not _is_begun_here(flow_run)


def _is_begun_here(flow_run: FlowRun) -> bool:
    """Whether a process that Prefect's worker started for a flow run lives on this machine."""
    import psutil

    for process in psutil.process_iter(["cmdline"]):
        if "prefect.engine" in (process.info["cmdline"] or ()):
            with contextlib.suppress(psutil.Error):  # it ended, or is another user's
                if process.environ().get("PREFECT__FLOW_RUN_ID") == str(flow_run.id):
                    return True
    return False


def _has_other_workers(client: SyncPrefectClient) -> bool:
    """Whether another machine's worker takes flow runs of the pool, too."""
    workers = client.read_workers_for_work_pool(POOL)
    return any(one.status == "ONLINE" and one.name != _worker_name() for one in workers)


def _schedule_again(flow_run: FlowRun, client: SyncPrefectClient, log: Log) -> None:
    from prefect.states import Crashed, Scheduled

    if flow_run.run_count >= _MOST_BEGINNINGS:
        state: State[Any] = Crashed(message=f"its process died {flow_run.run_count} times.")
    else:
        log(f"firing {flow_run.id} of {flow_run.expected_start_time} is continued")
        state = Scheduled(message="its process is gone; it is continued")
    client.set_flow_run_state(flow_run.id, state, force=True)


def _tell_end(flow_run: FlowRun, firing: Firing | None, client: SyncPrefectClient) -> None:
    from prefect.states import Cancelled, Completed, Failed

    kinds: dict[str, Any] = {"completed": Completed, "failed": Failed, "skipped": Completed}
    message = firing.told if firing is not None else ""
    end = kinds.get(firing.state if firing is not None else "", Cancelled)(message=message)
    client.set_flow_run_state(flow_run.id, end, force=True)


def _open_flow_runs(deployment_id: Any, client: SyncPrefectClient) -> list[FlowRun]:
    """Return a deployment's flow runs that a worker has taken and that have no good end."""
    from prefect.client.schemas.filters import (
        DeploymentFilter,
        DeploymentFilterId,
        FlowRunFilter,
        FlowRunFilterExpectedStartTime,
        FlowRunFilterState,
        FlowRunFilterStateType,
    )
    from prefect.client.schemas.objects import StateType

    types = [StateType.PENDING, StateType.RUNNING, StateType.CANCELLING, StateType.CRASHED]
    since = datetime.now(UTC) - timedelta(days=30)
    chosen = FlowRunFilter(
        state=FlowRunFilterState(type=FlowRunFilterStateType(any_=types)),
        expected_start_time=FlowRunFilterExpectedStartTime(after_=since),
    )
    of = DeploymentFilter(id=DeploymentFilterId(any_=[deployment_id]))
    found = client.read_flow_runs(flow_run_filter=chosen, deployment_filter=of, limit=200)
    # One that died for good is crashed as often as it began.
    return [
        one
        for one in found
        if not (one.state and one.state.is_crashed() and one.run_count >= _MOST_BEGINNINGS)
    ]


def _age_of(state: Any) -> float:
    return float((datetime.now(UTC) - state.timestamp).total_seconds())


@dataclass(frozen=True)
class _Worker:
    """Prefect's worker, and the server that it asks for flow runs."""

    process: subprocess.Popen[bytes]
    url: str

    @classmethod
    def start(cls, url: str, limit: int) -> _Worker:
        """Start one that ends with this process."""
        parent = os.getpid()
        command = [sys.executable, "-P", "-m", "prefect", "worker", "start", "--pool", POOL]
        options = ["--type", "process", "--name", _worker_name(), "--install-policy", "never"]
        options += ["--limit", str(limit)]
        process = subprocess.Popen(
            [*command, *options],
            env=os.environ | {"PREFECT_WORKER_QUERY_SECONDS": str(_SECONDS_BETWEEN_LOOKS)},
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for this process, which ends the worker in its way
            preexec_fn=lambda: die_with_parent(parent),
        )
        return cls(process, url)

    def why_not(self, url: str) -> str:
        """Say why it cannot fire what the server at `url` schedules, or nothing."""
        if self.process.poll() is not None:
            return f"the worker ended with exit code {self.process.returncode}"
        return "" if self.url == url else f"the server is at {url} now"

    def end(self) -> None:
        """End the worker alone: the firings' processes go on, and so do their runs."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait(_SECONDS_TO_END)


def _worker_name() -> str:
    return f"redco-flow on {os.uname().nodename}"


@contextlib.contextmanager
def _only_one() -> Iterator[None]:
    """Hold the place of the one process that serves.

    Raises:
        UsageError: another one does.
    """
    lock = LockRequest(lock_path()).try_once()
    if lock is None:
        serving = Serving.find()
        who = serving.process if serving is not None else "another process"
        raise UsageError(f"schedules are served already, by {who}.")
    try:
        yield
    finally:
        lock.release()
