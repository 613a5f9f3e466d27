"""Run the Prefect flow of one run in a separate thread.

Finds an API, falls back to a short-lived one, loads `flows/pipeline.py` and runs it. Nothing
here may fail the run: where Prefect fails, the main thread completes the stages. Prefect is
imported in this thread only.
"""

from __future__ import annotations

import importlib.util
import threading
import time
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from redco_flow.orchestrate.prefect import report
from redco_flow.orchestrate.prefect.api import PrefectApi, is_healthy
from redco_flow.orchestrate.prefect.report import OpenFlowRun, finish_left_over
from redco_flow.orchestrate.prefect.server import (
    PrefectServerError,
    api_at,
    ensure_server,
    server_status,
    start_short_lived_server,
)
from redco_flow.orchestrate.run.session import RunSession, session_in_use
from redco_flow.orchestrate.run.stopping import Log
from redco_flow.spec.find import bundled_behind, find_file

_FLOW_FILE = "flows/pipeline.py"
_SECONDS_BETWEEN_LOOKS = 0.5


class FlowThread:
    """One run of the flow."""

    def __init__(self, session: RunSession, log: Log) -> None:
        self._session = session
        self._log = log
        self._thread = threading.Thread(target=self._run, name="flow", daemon=True)
        self._api: PrefectApi | None = None
        self._open_flow_run: OpenFlowRun | None = None

    def start(self) -> None:
        """Start the flow; `session.stages_ended` is set when it has ended."""
        self._thread.start()

    def close(self, seconds: float) -> None:
        """Wait a while for Prefect to record the run's end, or for its server to come back.

        Where neither happens the next run sends the end.
        """
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self._thread.join(_SECONDS_BETWEEN_LOOKS)
            if self._thread.is_alive():
                continue
            opened, api = self._open_flow_run, self._api
            if api is None or opened is None or not opened.is_open:
                return
            if is_healthy(api.url) and opened.finish():
                return
            time.sleep(_SECONDS_BETWEEN_LOOKS)

    def _run(self) -> None:
        try:
            with session_in_use(self._session):
                self._run_flow()
        except BaseException:  # noqa: BLE001 (the main thread continues without a flow)
            self._log(f"the Prefect flow ended early:\n{traceback.format_exc()}")
        finally:
            self._session.stages_ended.set()

    def _run_flow(self) -> None:
        context = self._session.context
        if not server_status(context.profile.prefect_api_url).healthy:
            context.state_store.set_phase("starting the Prefect server; later runs find it")
        api = self._api = find_api(context.profile.prefect_api_url, self._log)
        if context.stop.is_set:
            return
        context.state_store.set_phase("importing Prefect")
        report.prepare_environment(api)
        flow = self._load_flow()
        # Flow runs of dead processes come first: an earlier one of this run gets its present state.
        finish_left_over(api)
        context.state_store.set_phase(f"registering the run at the Prefect server {api.url}")
        tags = context.pipeline.document["tags"]
        try:
            flow_run, opened = report.create_flow_run(flow, context.run, api, tags=tags)
        except Exception as error:  # noqa: BLE001 (Prefect is a view: any error is only logged)
            self._log(
                f"warning: the Prefect API at {api.url} answers but rejects this run "
                f"({error!r}): its database may be locked, read-only or full. The run continues "
                f"without a page there."
            )
            return
        self._open_flow_run = opened
        if url := report.page_of(flow_run, api):
            context.state_store.set_prefect_url(url)
        watching = report.watch_for_cancelling(flow_run.id, context.stop.cancel)
        try:
            from prefect.flow_engine import run_flow

            parameters = flow_run.parameters
            run_flow(flow, flow_run=flow_run, parameters=parameters, return_type="state")
            if self._session.summary_is_published:
                opened.close()
        finally:
            watching.set()

    def _load_flow(self) -> Any:
        if replaced := bundled_behind("flows", _FLOW_FILE):
            self._log(f"the flow is {replaced[0].absolute()}, not the bundled one.")
        module = load_flow_module(find_file("flows", _FLOW_FILE))
        from prefect.task_runners import ThreadPoolTaskRunner

        # One thread per stage: a task that waits for its inputs holds a thread too.
        num_threads = max(1, len(self._session.stages))
        return module.run_pipeline.with_options(
            name=self._session.context.pipeline.name,
            task_runner=ThreadPoolTaskRunner(max_workers=num_threads),
        )


def find_api(profile_url: str | None, log: Log) -> PrefectApi:
    """Return the API to report to; a short-lived one where no server can be had.

    Raises:
        PrefectServerError: not even that could be started.
    """
    try:
        url = ensure_server(profile_url)
    except PrefectServerError as error:
        log(f"warning: {error}\nThe run reports to a short-lived Prefect API without a page.")
        return start_short_lived_server()
    return api_at(url, profile_url)


def load_flow_module(path: Path) -> ModuleType:
    """Import the file that holds `run_pipeline`.

    Raises:
        ImportError: it has no such flow.
    """
    spec = importlib.util.spec_from_file_location("redco_flow_pipeline_flow", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(module, "run_pipeline"):
        raise ImportError(f"{path}: a flow file must define the flow `run_pipeline`.")
    return module
