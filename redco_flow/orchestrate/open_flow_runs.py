"""Flow runs whose end the Prefect server does not have yet, and how it gets it later.

`~/.redco-flow/prefect/open/<flow run id>.json` stands from a flow run's start until the server
has its end. What a dead orchestrator, or a lost server, leaves there is settled by the next run:
the run's own files say how it ended. Nothing here may fail a run.
"""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict
from uuid import UUID

from redco_flow.errors import DamagedRecord
from redco_flow.orchestrate.launch_record import LaunchRecord
from redco_flow.orchestrate.prefect_api import PrefectApi, ask
from redco_flow.orchestrate.prefect_server import home_directory
from redco_flow.orchestrate.state_book import ENDED_RUN_STATES
from redco_flow.orchestrate.summary import headline, run_summary, summary_key
from redco_flow.records import write_json
from redco_flow.tracking.process_identity import ProcessIdentity, ProcessRecord
from redco_flow.tracking.run_directory import RunDirectory
from redco_flow.tracking.typed_records import find_record, unless_damaged
from redco_flow.tracking.workspace import Workspace

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas import State

_SECONDS_TO_ANSWER = 10.0


class OpenRecord(TypedDict):
    """A flow run that a process has begun."""

    run: str
    database: str
    process: ProcessRecord


@dataclass(frozen=True)
class OpenFlowRun:
    """One such flow run."""

    path: Path
    run: RunDirectory

    @classmethod
    def note(cls, flow_run_id: str, run: RunDirectory, api: PrefectApi) -> OpenFlowRun:
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

    def settle(self) -> bool:
        """Tell the server the end, by the run's own files; return whether it has it now."""
        from prefect.client.orchestration import get_client
        from prefect.exceptions import ObjectNotFound
        from prefect.settings import (
            PREFECT_API_REQUEST_TIMEOUT,
            PREFECT_CLIENT_MAX_RETRIES,
            temporary_settings,
        )

        patience = {PREFECT_API_REQUEST_TIMEOUT: _SECONDS_TO_ANSWER, PREFECT_CLIENT_MAX_RETRIES: 0}
        try:
            with temporary_settings(patience):
                with get_client(sync_client=True) as client:
                    self._tell(client, UUID(self.path.stem))
        except ObjectNotFound:
            pass  # it was deleted there
        except Exception:  # noqa: BLE001 (the next run tries again)
            return False
        self.close()
        return True

    def _tell(self, client: SyncPrefectClient, flow_run_id: UUID) -> None:
        from prefect.client.schemas.actions import ArtifactCreate

        state = state_left_by(self.run)
        if not state.is_crashed():
            workspace = Workspace(Path(LaunchRecord.read(self.run).workspace))
            summary = ArtifactCreate(
                key=summary_key(self.run),
                type="markdown",
                description=headline(self.run),
                data=run_summary(self.run, workspace),
                flow_run_id=flow_run_id,
            )
            client.create_artifact(summary)
        client.set_flow_run_state(flow_run_id, state, force=True)


def settle_left_over(api: PrefectApi) -> None:
    """Settle what processes that are gone have left open at this API."""
    for path, record in _open_records(api):
        if not ProcessIdentity.from_json(record["process"]).is_alive():
            is_settled = OpenFlowRun(path, RunDirectory(Path(record["run"]))).settle()
            if not is_settled:
                return  # who does not answer for one, in seconds, is not asked about the others


def users_of(api: PrefectApi) -> list[str]:
    """Name the runs and other flows that report to our server now, of all users.

    Flows that are not ours are known only where the server answers.
    """
    users, known = [], set()
    for path, record in _open_records(api):
        known.add(path.stem)
        process = ProcessIdentity.from_json(record["process"])
        if process.is_alive() and not _has_ended(RunDirectory(Path(record["run"]))):
            users.append(f"run {record['run']} (process {process.pid})")
    return users + [name for id_, name in _running_flows(api) if id_ not in known]


def _open_records(api: PrefectApi) -> Iterator[tuple[Path, OpenRecord]]:
    """Every flow run that a process has begun at this API, whether that still lives or not."""
    folder = _folder()
    for path in sorted(folder.glob("*.json")) if folder.is_dir() else []:
        record = unless_damaged(lambda path=path: find_record(path, OpenRecord))  # type: ignore[misc]
        if record is not None and record["database"] == api.database:
            yield path, record


def _has_ended(run: RunDirectory) -> bool:
    try:
        return run.read_state()["state"] in ENDED_RUN_STATES
    except (OSError, ValueError, KeyError, TypeError):
        return False


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


def state_left_by(run: RunDirectory) -> State[Any]:
    """Return the flow run's end: the run's own, or "crashed" where that has none."""
    from prefect.states import Cancelled, Completed, Crashed, Failed

    kinds = {"completed": Completed, "failed": Failed, "cancelled": Cancelled}
    try:
        state = run.read_state()
    except DamagedRecord as damage:
        return Crashed(message=str(damage))
    if state["state"] in kinds:
        return kinds[state["state"]](message=state.get("message") or None)
    return Crashed(message="its launcher died; `redco-flow resume` takes the run up again.")


def _folder() -> Path:
    return home_directory() / "prefect" / "open"
