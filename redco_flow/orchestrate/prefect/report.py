"""Flow runs at a Prefect API: create, summarize and finish them, also after their process died.

The flow run is created before the flow starts (its id is then known for the page's address and for
cancelling) and carries the tags: a tag on a task would make it ask the server for a slot, and a
dead server would then stop the run. Every call here may fail without harm: Prefect is a view.
"""

from __future__ import annotations

import contextlib
import contextvars
import http.client
import importlib
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict
from uuid import UUID

from redco_flow.errors import DamagedRecord
from redco_flow.orchestrate.prefect.api import PrefectApi, ask, ui_url
from redco_flow.orchestrate.prefect.server import name_own, prefect_directory
from redco_flow.orchestrate.run.session import RunSession
from redco_flow.orchestrate.run.state import LaunchRecord
from redco_flow.records import write_json
from redco_flow.spec.secrets import hide_secrets
from redco_flow.tracking.attempt import ENDED_RUN_STATES
from redco_flow.tracking.process_identity import ProcessIdentity, ProcessRecord
from redco_flow.tracking.run_directory import RunDirectory
from redco_flow.tracking.sweep_directory import SweepDirectory
from redco_flow.tracking.typed_records import find_record, unless_damaged
from redco_flow.tracking.workspace import Workspace, home_directory, user_name

if TYPE_CHECKING:
    from prefect import Flow
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas import FlowRun, State


SCHEDULE_VARIABLE = "REDCO_FLOW_SCHEDULE"
"""Of the environment: the name of the schedule whose firing started this process."""

ENDING = threading.Lock()
"""Held while a flow run that a dead process has left is ended, or taken over."""

_SECONDS_TO_ANSWER = 10.0
_ENDS_WORST_FIRST = ("failed", "cancelled", "completed", "stopped_early")
_SECONDS_BETWEEN_LOOKS = 2.0


@contextlib.contextmanager
def impatient_client(*, num_retries: int = 0) -> Iterator[SyncPrefectClient]:
    """Yield a client of the API that waits a few seconds at most for each answer."""
    from prefect.client.orchestration import get_client
    from prefect.settings import (
        PREFECT_API_REQUEST_TIMEOUT,
        PREFECT_CLIENT_MAX_RETRIES,
        temporary_settings,
    )

    patience = {
        PREFECT_API_REQUEST_TIMEOUT: _SECONDS_TO_ANSWER,
        PREFECT_CLIENT_MAX_RETRIES: num_retries,
    }
    with temporary_settings(patience), get_client(sync_client=True) as client:
        yield client


def put_summary(
    run: RunDirectory, workspace: Workspace, flow_run_id: UUID, client: SyncPrefectClient
) -> None:
    """Create the artifact with the run's summary, or update the one that was sent before.

    Raises:
        DamagedRecord: the run's own records cannot be read.
        Exception: any that Prefect's client raises where the API rejects the artifact.
    """
    from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId

    # By name: the report and the orchestrator do not import each other.
    page = importlib.import_module("redco_flow.report.prefect_page")
    summary = page.run_summary(run, workspace)
    content: dict[str, Any] = {"description": summary.description, "data": summary.data}
    of_run = FlowRunFilter(id=FlowRunFilterId(any_=[flow_run_id]))
    sent = client.read_artifacts(flow_run_filter=of_run)
    if (known := next((one.id for one in sent if one.key == summary.key), None)) is not None:
        client.update_artifact(known, ArtifactUpdate(**content))
        return
    client.create_artifact(
        ArtifactCreate(key=summary.key, type="markdown", flow_run_id=flow_run_id, **content)
    )


class OpenRecord(TypedDict):
    """A flow run that a process has begun."""

    run: str
    database: str
    process: ProcessRecord


@dataclass(frozen=True)
class OpenFlowRun:
    """A flow run whose end the server does not have yet, and its record."""

    path: Path
    run: RunDirectory | SweepDirectory

    @classmethod
    def note(
        cls, flow_run_id: str, run: RunDirectory | SweepDirectory, api: PrefectApi
    ) -> OpenFlowRun:
        """Note that this process has begun a flow run."""
        folder = _folder()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        process = ProcessIdentity.current().to_json()
        record = {"run": str(run.path), "database": api.database, "process": process}
        write_json(folder / f"{flow_run_id}.json", record)
        return cls(folder / f"{flow_run_id}.json", run)

    @property
    def is_open(self) -> bool:
        """Whether the server does not have the end yet."""
        return self.path.exists()

    def close(self) -> None:
        """Note that the server has the flow run's end."""
        self.path.unlink(missing_ok=True)

    def give_up(self) -> None:
        """Leave the end to a later run, as if this process were gone."""
        record = find_record(self.path, OpenRecord)
        if record is not None:
            write_json(self.path, {**record, "process": {**record["process"], "start_time": 0}})

    def finish(self, *, is_resumed: bool = False) -> bool:
        """Send the run's end by its own files; return whether the server has it now.

        Args:
            is_resumed: this process has taken the run over: the flow run's own end is a crash.
        """
        from prefect.exceptions import ObjectNotFound

        try:
            with impatient_client() as client:
                state = _crashed_before_resume() if is_resumed else state_left_by(self.run)
                self._send_end(client, UUID(self.path.stem), state)
        except ObjectNotFound:
            pass  # it was deleted there
        except Exception:  # noqa: BLE001 (the next run tries again)
            return False
        self.close()
        return True

    def _send_end(self, client: SyncPrefectClient, flow_run_id: UUID, state: State[Any]) -> None:
        if not state.is_crashed() and isinstance(self.run, RunDirectory):
            with contextlib.suppress(DamagedRecord):  # the end can be sent all the same
                workspace = Workspace(Path(LaunchRecord.read(self.run).workspace))
                put_summary(self.run, workspace, flow_run_id, client)
        client.set_flow_run_state(flow_run_id, state, force=True)


def finish_left_over(api: PrefectApi, resumed: RunDirectory | None = None) -> None:
    """Finish the flow runs that processes which are gone have left open at this API.

    Args:
        resumed: the run of this process, which may have ended already.
    """
    with contextlib.suppress(Exception), impatient_client() as client:  # tried again by the next
        refuse_retries(client)
    for path, record in _open_records(api):
        if not ProcessIdentity.from_json(record["process"]).is_alive():
            run = _directory_of(record)
            is_resumed = resumed is not None and run.path == resumed.path
            with ENDING:
                # A process that has taken a sweep over continues its flow run.
                if find_record(path, OpenRecord) != record:
                    continue
                is_finished = OpenFlowRun(path, run).finish(is_resumed=is_resumed)
            if not is_finished:
                return  # a server that does not answer for one is not asked about the others


def refuse_retries(client: SyncPrefectClient) -> None:
    """End the runs that were retried on their pages again: no worker of Prefect's starts them."""
    from prefect.client.schemas.filters import (
        FlowRunFilter,
        FlowRunFilterDeploymentId,
        FlowRunFilterState,
        FlowRunFilterStateName,
        FlowRunFilterTags,
    )

    waiting = FlowRunFilterStateName(any_=["AwaitingRetry"])
    ours = FlowRunFilter(
        state=FlowRunFilterState(name=waiting),
        tags=FlowRunFilterTags(all_=["redco-flow", f"user: {user_name()}"]),
        deployment_id=FlowRunFilterDeploymentId(is_null_=True),
    )
    for one in client.read_flow_runs(flow_run_filter=ours):
        ends = [state for state in client.read_flow_run_states(one.id) if state.is_final()]
        if not ends:  # a flow of the user's own, which retries itself
            continue
        end = max(ends, key=lambda state: state.timestamp)
        verb = "resume" if f"sweep: {one.name}" in one.tags else "retry"
        message = f"not retried from this page: `redco-flow {verb} {one.name}` does that."
        again = type(end)(type=end.type, name=end.name, message=message)
        client.set_flow_run_state(one.id, again, force=True)


def users_of(api: PrefectApi) -> list[str]:
    """Name the runs and other flows that report to our server now, of all users.

    Flows that are not ours are known only where the server answers.
    """
    users, known = [], set()
    for path, record in _open_records(api):
        known.add(path.stem)
        process = ProcessIdentity.from_json(record["process"])
        if process.is_alive() and not _has_ended(run := _directory_of(record)):
            kind = "run" if isinstance(run, RunDirectory) else "sweep"
            users.append(f"{kind} {record['run']} (process {process.pid})")
    return users + [name for id_, name in _running_flows(api) if id_ not in known]


def _open_records(api: PrefectApi) -> Iterator[tuple[Path, OpenRecord]]:
    """Every flow run that a process has begun at this API, whether that still lives or not."""
    folder = _folder()
    for path in sorted(folder.glob("*.json")) if folder.is_dir() else []:
        record = unless_damaged(lambda path=path: find_record(path, OpenRecord))  # type: ignore[misc]
        if record is not None and record["database"] == api.database:
            yield path, record


def _directory_of(record: OpenRecord) -> RunDirectory | SweepDirectory:
    path = Path(record["run"])
    return SweepDirectory(path) if path.parent.name == "sweeps" else RunDirectory(path)


def _has_ended(run: RunDirectory | SweepDirectory) -> bool:
    try:
        states = _states_of(run) if isinstance(run, SweepDirectory) else [run.read_state()["state"]]
        return all(state in ENDED_RUN_STATES for state in states)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _states_of(sweep: SweepDirectory) -> list[str]:
    return [*(run.read_state()["state"] for run in sweep.runs), *sweep.states_without_runs]


def _running_flows(api: PrefectApi) -> list[tuple[str, str]]:
    """The id and a name for people of every flow run that the server takes for running."""
    running = {"state": {"type": {"any_": ["RUNNING", "CANCELLING"]}}}
    try:
        found = ask(api, "/flow_runs/filter", {"flow_runs": running, "limit": 50})
        return [
            (one["id"], f"flow run {one['name']!r} (since {one['start_time']})") for one in found
        ]
    except (OSError, ValueError, http.client.HTTPException, KeyError, TypeError):
        return []


def state_left_by(run: RunDirectory | SweepDirectory) -> State[Any]:
    """Return the flow run's end: the run's or sweep's own, or "crashed" where that has none."""
    from prefect.states import Cancelled, Completed, Crashed, Failed

    kinds = {
        "completed": Completed,
        "failed": Failed,
        "cancelled": Cancelled,
        "stopped_early": Completed,
    }
    try:
        state, message = _end_of(run)
    except (DamagedRecord, FileNotFoundError) as error:
        return Crashed(message=f"its records are gone or damaged: {error}")
    if state in kinds:
        return kinds[state](message=message)
    return Crashed(message=f"its launcher died; `redco-flow resume {run.id}` continues it.")


def _end_of(run: RunDirectory | SweepDirectory) -> tuple[str, str | None]:
    """Return the state and a message; of a sweep, the state of the points that ended worst."""
    if isinstance(run, RunDirectory):
        state = run.read_state()
        return state["state"], state.get("message") or None
    count = Counter(_states_of(run))
    is_over = count.keys() <= {*_ENDS_WORST_FIRST}
    worst = next(end for end in _ENDS_WORST_FIRST if end in count) if is_over else "open"
    return worst, ", ".join(f"{number} {state}" for state, number in count.most_common())


def _crashed_before_resume() -> State[Any]:
    from prefect.states import Crashed

    return Crashed(message="its launcher died; `redco-flow resume` continued the run.")


def _folder() -> Path:
    return home_directory() / "prefect" / "open"


def prepare_environment(api: PrefectApi) -> None:
    """Set what Prefect reads when it is imported; call it before."""
    settings = {
        "DO_NOT_TRACK": "1",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
        "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
        "PREFECT_LOGGING_COLORS": "false",
        # A run's log has the launcher's lines already, and a process may drive several runs.
        "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "WARNING",
    }
    for name, value in settings.items():
        os.environ.setdefault(name, value)
    if api.is_ours:
        # The user's own Prefect profile may name another API and its key.
        os.environ["PREFECT_HOME"] = str(prefect_directory())
        assert api.auth is not None
        os.environ["PREFECT_API_AUTH_STRING"] = api.auth
        # A proxy cannot reach this machine's own address.
        for name in ("NO_PROXY", "no_proxy"):
            hosts = [*os.environ.get(name, "").split(","), "127.0.0.1", "localhost"]
            os.environ[name] = ",".join(dict.fromkeys(filter(None, hosts)))
        name_own(api.url)
    else:
        os.environ["PREFECT_API_URL"] = api.url


def create_flow_run(
    flow: Flow[Any, Any],
    run: RunDirectory,
    client: SyncPrefectClient,
    *,
    tags: Sequence[str],
    parent_task_run_id: UUID | None = None,
) -> FlowRun:
    """Make the run's flow run at the API.

    Args:
        tags: the pipeline's own, beside `common_tags`.
        parent_task_run_id: of a sweep's flow run, whose subflow run this becomes.

    Raises:
        Exception: any that Prefect's client raises when the API rejects the flow run, or does not
            answer within half a minute.
    """
    from prefect.states import Pending

    given = run.record
    parameters = {
        "pipeline": given["pipeline_path"],
        "profile": given["profile"],
        "overrides": [hide_secrets(one) for one in given["overrides"]],
    }
    return client.create_flow_run(
        flow,
        parameters=parameters,
        name=run.id,
        tags=[*common_tags(run), *tags],
        parent_task_run_id=parent_task_run_id,
        state=Pending(),
    )


def common_tags(run: RunDirectory) -> list[str]:
    """Return the tags of a run's flow run: pipeline, profile, user, host, sweep and schedule."""
    given = run.record
    # Of a server that several people share: whose run it is, and where its files are.
    origin = [f"user: {user_name()}", f"host: {os.uname().nodename}"]
    tags = [
        "redco-flow",
        f"pipeline: {given['name']}",
        f"profile: {given['profile']}",
        *origin,
    ]
    if sweep := given.get("sweep"):
        tags.append(f"sweep: {sweep}")
    if schedule := os.environ.get(SCHEDULE_VARIABLE):
        tags.append(f"schedule: {schedule}")
    return tags


def page_of(flow_run: FlowRun, api: PrefectApi) -> str:
    """Return the address of the flow run's page."""
    return f"{ui_url(api.url)}/runs/flow-run/{flow_run.id}"


def publish_summary(session: RunSession) -> None:
    """Put the run's summary on its page; where that fails it is tried again after the flow."""
    from prefect.context import get_run_context
    from prefect.logging import get_run_logger

    flow_run = get_run_context().flow_run  # type: ignore[union-attr]
    assert flow_run is not None
    try:
        context = session.context
        with impatient_client(num_retries=1) as client:
            put_summary(context.run, context.workspace, flow_run.id, client)
        session.summary_is_published = True
    except Exception as error:  # noqa: BLE001 (the server may be gone, a record damaged)
        get_run_logger().warning("the run's page could not be filled: %r", error)


def watch_for_cancelling(flow_run_id: UUID, on_cancel: Callable[[str], None]) -> threading.Event:
    """Poll the API for a cancellation of the flow run on its page.

    Prefect notifies a flow of that only if one of its own workers has started the flow.

    Returns:
        An event that ends the polling.
    """
    done = threading.Event()

    def look() -> None:
        with impatient_client() as client:
            while not done.wait(_SECONDS_BETWEEN_LOOKS):
                with contextlib.suppress(Exception):  # the server may be down
                    state = client.read_flow_run(flow_run_id).state
                    if state and (state.is_cancelling() or state.is_cancelled()):
                        on_cancel("cancelled on its Prefect page")
                        return

    # With the settings of the caller's context: the server may have moved since Prefect's import.
    look_there = partial(contextvars.copy_context().run, look)
    threading.Thread(target=look_there, name="watch-for-cancelling", daemon=True).start()
    return done
