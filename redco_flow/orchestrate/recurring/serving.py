"""Keep the Prefect server and the deployments there, and fire schedules, for `redco-flow serve`.

`redco-flow serve` runs `serve` in the foreground or detached. Prefect's server computes the dates;
this process asks it every few seconds for what is due (`flow_runs.py`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import UUID

from redco_flow.errors import RedcoFlowError, UsageError
from redco_flow.orchestrate.prefect.api import PrefectApi
from redco_flow.orchestrate.prefect.report import refuse_retries
from redco_flow.orchestrate.prefect.server import prefect_directory
from redco_flow.orchestrate.recurring.deployments import (
    MAX_FIRINGS,
    client_of,
    connect,
    delete_noted,
    deploy,
    deployments,
    find_deployment,
    make_pool,
    move_to_pool,
)
from redco_flow.orchestrate.recurring.firing import SECONDS_LATE
from redco_flow.orchestrate.recurring.flow_runs import SECONDS_BETWEEN_LOOKS, FlowRuns
from redco_flow.orchestrate.recurring.serving_record import (
    Serving,
    known_workspaces,
    last_look,
    lock_path,
    note_look,
    note_serving,
)
from redco_flow.orchestrate.recurring.silence import is_watched, watch_silence
from redco_flow.orchestrate.run.cancel import Log
from redco_flow.records import open_no_link
from redco_flow.tracking.file_lock import LockRequest
from redco_flow.tracking.process_identity import ProcessIdentity
from redco_flow.tracking.schedules import ScheduleDirectory, list_schedules
from redco_flow.tracking.typed_records import unless_damaged
from redco_flow.tracking.workspace import Workspace

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.responses import DeploymentResponse

_SECONDS_TO_END = 40.0
_SECONDS_TO_START = 120.0


def serve(log: Log, stop: threading.Event, limit: int = MAX_FIRINGS) -> None:
    """Serve until told to stop.

    Args:
        limit: firings at once; the others wait at the Prefect server.

    Raises:
        UsageError: another process serves.
    """
    with _only_one():
        note_serving()
        flow_runs, served = FlowRuns(log, limit), ""
        looked, noted = _Moment.of_last_look(), None
        while not stop.is_set():
            try:
                api = connect()
                now = _Moment.now()
                if is_late := now.is_long_after(looked):
                    # Before any firing begins, which asks since when this process serves.
                    note_serving()
                _attend(flow_runs, api, log, limit, looked.date if is_late else None)
                # Making up may take long: that it did is no reason for the next look to be late.
                looked = _Moment.now() if is_late else now
                if noted is None or now.is_long_after(noted):
                    note_look()
                    noted = now
                if api.url != served:
                    log(f"serving schedules of {api.url}")
                    served = api.url
            except Exception as error:  # noqa: BLE001 (a server that restarts; told and tried again)
                log(f"warning: {error}; tried again in {SECONDS_BETWEEN_LOOKS:.0f} s")
            stop.wait(SECONDS_BETWEEN_LOOKS)


@dataclass(frozen=True)
class _Moment:
    """A moment by the machine's clock, which people set, and by one that counts its sleep, too."""

    clock: float
    since_boot: float

    @classmethod
    def now(cls) -> _Moment:
        return cls(time.time(), time.clock_gettime(time.CLOCK_BOOTTIME))

    @classmethod
    def of_last_look(cls) -> _Moment:
        """Return when a process last found all that was due; now, if none ever did."""
        looked = last_look()
        return replace(cls.now(), clock=looked.timestamp()) if looked else cls.now()

    @property
    def date(self) -> datetime:
        """By the machine's clock."""
        return datetime.fromtimestamp(self.clock, UTC)

    def is_long_after(self, other: _Moment) -> bool:
        """Whether what came due since another moment was missed."""
        return max(self.clock - other.clock, self.since_boot - other.since_boot) > SECONDS_LATE


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
        UsageError: it is a process of another host or container.
        RedcoFlowError: it has not ended in time.
    """
    serving = Serving.find()
    if serving is None:
        return False
    if serving.is_elsewhere:
        raise UsageError(
            f"schedules are served by {serving.process}, which cannot be seen from here: end it "
            f"on its own host, in its own container."
        )
    os.kill(serving.process.pid, signal.SIGTERM)
    deadline = time.monotonic() + _SECONDS_TO_END
    while serving.process.is_alive():
        if time.monotonic() >= deadline:
            raise RedcoFlowError(
                f"{serving.process} was asked to end and still runs after {_SECONDS_TO_END:.0f} s: "
                "`redco-flow serve --stop` waits for it again; its log is serve.log in "
                f"{prefect_directory()}."
            )
        time.sleep(0.1)
    return True


def _attend(
    flow_runs: FlowRuns, api: PrefectApi, log: Log, limit: int, missed_since: datetime | None
) -> None:
    """Look after the deployments and the flow runs on the server."""
    with client_of(api) as client:
        delete_noted(client)
        refuse_retries(client)
        make_pool(client, limit)
        workspaces = [Workspace(Path(root)) for root in known_workspaces()]
        found = restore(workspaces, client, flow_runs, log)
        flow_runs.attend(client, api, missed_since, found)


def restore(
    workspaces: Iterable[Workspace], client: SyncPrefectClient, flow_runs: FlowRuns, log: Log
) -> list[DeploymentResponse]:
    """Make what workspaces' schedules lack on the server: deployments, automations.

    Returns:
        the deployments of this user's schedules, of every workspace.
    """
    found = deployments(client)
    present = {one.name: one.id for one in found}
    has_changed = False
    for workspace in workspaces:
        with flow_runs.said_once(f"workspace {workspace.root}"):
            for directory in list_schedules(workspace):
                with flow_runs.said_once(f"schedule '{directory.name}'"):
                    has_changed |= _restore_one(directory, workspace, present, client, log)
    return deployments(client) if has_changed else found


def _restore_one(
    directory: ScheduleDirectory,
    workspace: Workspace,
    present: Mapping[str, UUID],
    client: SyncPrefectClient,
    log: Log,
) -> bool:
    """Return whether a deployment is new in this user's pool."""
    schedule = unless_damaged(directory.read)
    if schedule is None:
        return False
    deployment = present.get(schedule.name)
    if deployment is None and (found := find_deployment(schedule.name, client)):
        move_to_pool(found, client)
        deployment = found.id
    if deployment is None:
        deployment = deploy(schedule, workspace, client)
        log(f"the server had no deployment of '{schedule.name}': it is created again")
    if schedule.no_run_for and not is_watched(schedule.name, client):
        watch_silence(schedule, deployment, client)
    return schedule.name not in present


@contextlib.contextmanager
def _only_one() -> Iterator[None]:
    """Hold the place of the one process that serves."""
    lock = LockRequest(lock_path()).try_once()
    if lock is None:
        serving = Serving.find()
        who = serving.process if serving is not None else "another process"
        raise UsageError(f"schedules are served already, by {who}.")
    try:
        yield
    finally:
        lock.release()
