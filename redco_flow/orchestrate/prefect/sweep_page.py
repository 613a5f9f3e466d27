"""One Prefect flow run for a sweep, with the flow runs of its points as subflow runs.

It is made with the first point's flow run, by the process that drives the sweep, and found again by
its name when that process has been replaced. A point that is resumed alone joins it too.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from uuid import UUID

from redco_flow.orchestrate.prefect.api import PrefectApi, is_healthy
from redco_flow.orchestrate.prefect.report import (
    ENDING,
    OpenFlowRun,
    common_tags,
    watch_for_cancelling,
)
from redco_flow.tracking.run_directory import RunDirectory
from redco_flow.tracking.sweep_directory import SweepDirectory

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas import FlowRun

_SECONDS_BETWEEN_TRIES = 1.0
# Threads of several points may create their flow runs at the same time.
_MUTEX = threading.Lock()
_driven: dict[Path, SweepPage] = {}


class SweepPage:
    """The flow run of a sweep that this process drives, from its first point's flow run on.

    Args:
        on_cancel: is called with a reason when the flow run is cancelled on its page.

    Attributes:
        reason: of that, for people.
    """

    def __init__(self, sweep: SweepDirectory, on_cancel: Callable[[str], None]) -> None:
        self._sweep = sweep
        self._on_cancel = on_cancel
        self.reason = ""
        self._id: UUID | None = None
        self._open: OpenFlowRun | None = None
        self._api: PrefectApi | None = None
        self._watching: threading.Event | None = None

    def __enter__(self) -> Self:
        _driven[self._sweep.path] = self
        return self

    def __exit__(self, *error: object) -> None:
        del _driven[self._sweep.path]

    def find_or_create(
        self, point: RunDirectory, client: SyncPrefectClient, api: PrefectApi, tags: Sequence[str]
    ) -> UUID:
        """Return the id of the sweep's flow run, which runs from now on."""
        if self._id is not None:
            return self._id
        found = _find(self._sweep, client)
        id_ = found.id if found is not None else self._create(point, client, tags)
        with ENDING:  # not while another thread ends what the process before has left
            self._open = OpenFlowRun.note(str(id_), self._sweep, api)
            if found is not None:  # a new one may have been cancelled meanwhile
                client.set_flow_run_state(id_, _running(), force=True)
        self._api = api
        self._watching = watch_for_cancelling(id_, self._cancel)
        self._id = id_  # the next point tries again where an error came before
        return id_

    @property
    def is_cancelled(self) -> bool:
        """Whether it was cancelled on its page."""
        return bool(self.reason)

    def _cancel(self, reason: str) -> None:
        self.reason = reason
        self._on_cancel(reason)

    def close(self, seconds: float) -> None:
        """Send the sweep's end; where no server takes it, the next run does that.

        Args:
            seconds: to wait for a server.
        """
        if self._open is None or self._api is None or self._watching is None:
            return
        self._watching.set()
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if is_healthy(self._api.url) and self._open.finish():
                return
            time.sleep(_SECONDS_BETWEEN_TRIES)
        self._open.give_up()

    def _create(self, point: RunDirectory, client: SyncPrefectClient, tags: Sequence[str]) -> UUID:
        from prefect import Flow

        given, record = point.record, self._sweep.record
        parameters = {
            "pipeline": given["pipeline_path"],
            "profile": given["profile"],
            "points": self._sweep.num_points,
            "max_parallel": record["max_parallel"],
        }
        flow_run = client.create_flow_run(
            Flow(_run_sweep, name=f"{given['name']}: sweep"),
            parameters=parameters,
            name=self._sweep.id,
            tags=[*common_tags(point), *tags],
            state=_running(),
        )
        return flow_run.id


def _run_sweep(pipeline: str, profile: str, points: int, max_parallel: int) -> None:
    """The signature of the flow, for its page: the points are driven by the sweep's process."""


def _running() -> Any:
    from prefect.states import Running

    return Running()


def _find(sweep: SweepDirectory, client: SyncPrefectClient) -> FlowRun | None:
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterName

    named = FlowRunFilter(name=FlowRunFilterName(any_=[sweep.id]))
    return next(iter(client.read_flow_runs(flow_run_filter=named, limit=1)), None)


def place_in_sweep(
    point: RunDirectory, client: SyncPrefectClient, api: PrefectApi, tags: Sequence[str]
) -> UUID | None:
    """Return the task run in the sweep's flow run whose subflow run a point's flow run becomes.

    None for a run of no sweep, and for a point that is driven alone where the sweep has no flow
    run. Prefect's server gives the task run the states of its subflow run.

    Args:
        tags: the pipeline's own.

    Raises:
        Exception: any that Prefect's client raises when the API rejects it or does not answer.
    """
    sweep = SweepDirectory.of_point(point)
    if sweep is None:
        return None
    from prefect import Task

    with _MUTEX:
        page = _driven.get(sweep.path)
        if page is not None:
            parent = page.find_or_create(point, client, api, tags)
        elif (found := _find(sweep, client)) is not None:
            parent = found.id
        else:
            return None
        subflow = Task(_run_sweep, name=point.id)
        key = f"{point.id}-{time.time_ns()}"  # a resumed point has one for each of its flow runs
        return client.create_task_run(subflow, parent, dynamic_key=key, name=point.id).id
