"""Send what a run's page shows to a Prefect API: each artifact once in a flow run, then updated.

What is shown is made by `report.prefect_page` of the run's files alone.
"""

from __future__ import annotations

import contextlib
import importlib
import json
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any
from uuid import UUID

from redco_flow.tracking.run_directory import RunDirectory
from redco_flow.tracking.workspace import Workspace

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient

_MOST_ARTIFACTS = 200  # in one answer of the API; a run has a handful for each stage


@contextlib.contextmanager
def impatient_client(seconds: float, *, num_retries: int = 0) -> Iterator[SyncPrefectClient]:
    """Yield a client of the API that waits at most `seconds` for each answer."""
    from prefect.client.orchestration import get_client
    from prefect.settings import (
        PREFECT_API_REQUEST_TIMEOUT,
        PREFECT_CLIENT_MAX_RETRIES,
        temporary_settings,
    )

    patience = {PREFECT_API_REQUEST_TIMEOUT: seconds, PREFECT_CLIENT_MAX_RETRIES: num_retries}
    with temporary_settings(patience), get_client(sync_client=True) as client:
        yield client


def read_page_artifacts(run: RunDirectory, workspace: Workspace) -> list[Any]:
    """Return the `PageArtifact`s of a run.

    Raises:
        DamagedRecord: the run's own records cannot be read.
    """
    return list(_page().page_artifacts(run, workspace))


def read_live_artifact(run: RunDirectory, stage: str) -> Any:
    """Return the `PageArtifact` of a stage that is at work; None while it counts no steps."""
    return _page().live_artifact(run, stage)


def _page() -> Any:
    # By name: the report and the orchestrator know each other's files, not each other.
    return importlib.import_module("redco_flow.report.prefect_page")


class FlowRunArtifacts:
    """The artifacts of one flow run, so that none is there twice however often they are sent."""

    def __init__(self, flow_run_id: UUID) -> None:
        self._flow_run_id = flow_run_id
        self._ids: dict[str, UUID] | None = None

    def put(self, artifacts: Iterable[Any], client: SyncPrefectClient) -> None:
        """Make the artifacts, or bring those that are there up to date.

        Raises:
            Exception: whatever Prefect's client raises where the API does not take them.
        """
        from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate

        if self._ids is None:
            self._ids = self._find(client)
        for one in artifacts:
            data = json.dumps(one.data) if one.kind == "table" else one.data
            content: dict[str, Any] = {"description": one.description, "data": data}
            if (known := self._ids.get(one.key)) is not None:
                client.update_artifact(known, ArtifactUpdate(**content))
                continue
            made = client.create_artifact(
                ArtifactCreate(key=one.key, type=one.kind, flow_run_id=self._flow_run_id, **content)
            )
            self._ids[one.key] = made.id

    def _find(self, client: SyncPrefectClient) -> dict[str, UUID]:
        """The ids by key of what an earlier process, or this one's watch, has made."""
        from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId

        of = FlowRunFilter(id=FlowRunFilterId(any_=[self._flow_run_id]))
        found = client.read_artifacts(flow_run_filter=of, limit=_MOST_ARTIFACTS)
        return {one.key: one.id for one in found if one.key is not None}
