"""Show a run as a Prefect flow run, from a separate thread.

Prefect is a view: the stages run without it, and its tasks follow them. A flow run begins once an
API answers: one that is named, or our own server where it runs. A flow of the user's own
(`./flows/pipeline.py`) decides which stage runs when; only then are stages started by Prefect.
Nothing here may fail the run. Prefect is imported in this thread only, and only with an API.
"""

from __future__ import annotations

import importlib
import importlib.util
import threading
import time
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from redco_flow.errors import RedcoFlowError
from redco_flow.orchestrate.prefect import report
from redco_flow.orchestrate.prefect.api import PrefectApi, is_healthy
from redco_flow.orchestrate.prefect.report import OpenFlowRun, finish_left_over
from redco_flow.orchestrate.prefect.server import (
    PrefectServerError,
    api_at,
    ensure_server,
    external_url,
    own_api,
)
from redco_flow.orchestrate.prefect.sweep_page import place_in_sweep
from redco_flow.orchestrate.run.cancel import Log
from redco_flow.orchestrate.run.session import RunSession, session_in_use
from redco_flow.spec.find import FLOW_FILE, bundled_behind, find_file

_SECONDS_BETWEEN_LOOKS = 0.5
# Prefect is imported once for all runs of a process, for one address.
_PREPARING = threading.Lock()
_imported_for: dict[str, PrefectApi] = {}
# Until an API answers: `redco-flow ui --prefect` may start our server while a run is at work.
_FIRST_WAIT, _LAST_WAIT = 2.0, 60.0
_NUM_RETRIES = 3


class FlowThread:
    """One run of the flow.

    Attributes:
        decides: whether the flow is a user's own, which starts the stages.
    """

    def __init__(self, session: RunSession, log: Log) -> None:
        self._session = session
        self._log = log
        self._replaced = _own_flow(log)
        self.decides = self._replaced is not None
        self._thread = threading.Thread(target=self._run, name="flow", daemon=True)
        self._is_closing = threading.Event()
        self._api: PrefectApi | None = None
        self._open_flow_run: OpenFlowRun | None = None

    def start(self) -> None:
        """Begin; with a flow that decides, its end sets `session.stages_ended`."""
        self._thread.start()

    def close(self, seconds: float) -> None:
        """Wait a while for Prefect to record the run's end, or for its server to come back.

        Without either the next run reports it.
        """
        self._is_closing.set()
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
        if self._open_flow_run is not None:
            self._open_flow_run.give_up()

    def _run(self) -> None:
        try:
            api = self._api = self._wait_for_api()
            if api is not None and not self._session.context.stop.is_set:
                with session_in_use(self._session):
                    self._run_flow(api)
        except BaseException:  # noqa: BLE001 (the main thread needs no flow)
            self._log(f"the Prefect flow ended early:\n{traceback.format_exc()}")
        finally:
            if self.decides:
                self._session.stages_ended.set()

    def _wait_for_api(self) -> PrefectApi | None:
        """Return the API to report to; None where none has answered by the run's end."""
        context = self._session.context
        url = context.profile.prefect_api_url
        if self.decides or context.profile.start_prefect_server:
            self._note_phase("starting the Prefect server, or looking for it")
            try:
                return api_at(ensure_server(url), url)
            except PrefectServerError as error:
                self._log(f"warning: {error}")
                if self.decides:
                    return None
        seconds, has_warned = _FIRST_WAIT, False
        while (api := _known_api(url)) is None or not _can_report_to(api):
            if api is not None and not has_warned:
                self._log(
                    f"warning: no answer from the Prefect API at {api.url}: the run has no page"
                )
                has_warned = True
            if self._is_closing.wait(seconds):
                return None
            seconds = min(2 * seconds, _LAST_WAIT)
        return api

    def _run_flow(self, api: PrefectApi) -> None:
        context = self._session.context
        self._note_phase("importing Prefect")
        with _PREPARING:
            if _imported_for.setdefault("api", api) != api:
                self._log(
                    f"warning: the process of this run reports others to "
                    f"{_imported_for['api'].url}, not to {api.url}: the run has no page there."
                )
                return
            report.prepare_environment(api)
            importlib.import_module("prefect")
        flow = self._load_flow()
        # Flow runs of dead processes come first, also an earlier one of this run.
        finish_left_over(api, context.run)
        self._note_phase(f"registering the run at the Prefect server {api.url}")
        tags = context.pipeline.document["tags"]
        try:
            # A database may be locked for a moment. A flow that decides delays the stages.
            num_retries = 1 if self.decides else _NUM_RETRIES
            with report.impatient_client(num_retries=num_retries) as client:
                parent = place_in_sweep(context.run, client, api, tags)
                flow_run = report.create_flow_run(
                    flow, context.run, client, tags=tags, parent_task_run_id=parent
                )
            opened = OpenFlowRun.note(str(flow_run.id), context.run, api)
        except Exception as error:  # noqa: BLE001 (Prefect is a view: any error is reported)
            self._log(
                f"warning: the Prefect API at {api.url} does not accept this run ({error!r}): "
                f"{_why_refused(error)}. The run continues without a page there."
            )
            return
        self._open_flow_run = opened
        context.state_store.set_prefect_url(report.page_of(flow_run, api))
        watching = report.watch_for_cancelling(flow_run.id, context.stop.cancel)
        try:
            from prefect.flow_engine import run_flow

            parameters = flow_run.parameters
            run_flow(flow, flow_run=flow_run, parameters=parameters, return_type="state")
            if self._session.summary_is_published:
                opened.close()
        finally:
            watching.set()

    def _note_phase(self, message: str) -> None:
        """Say what people wait for; the stages wait for a flow only if it decides."""
        if self.decides:
            self._session.context.state_store.set_phase(message)

    def _load_flow(self) -> Any:
        if self._replaced is not None:
            self._log(f"the flow is {self._replaced[0].absolute()}, not the bundled one.")
        module = load_flow_module(find_file("flows", FLOW_FILE))
        from prefect.task_runners import ThreadPoolTaskRunner

        # One thread per stage: a task that waits for its inputs holds a thread too.
        num_threads = max(1, len(self._session.stages))
        return module.run_pipeline.with_options(
            name=self._session.context.pipeline.name,
            task_runner=ThreadPoolTaskRunner(max_workers=num_threads),
        )


def _own_flow(log: Log) -> tuple[Path, Path] | None:
    """Return the flow file of the current directory and the bundled one, if they differ."""
    try:
        return bundled_behind("flows", FLOW_FILE)
    except (OSError, RedcoFlowError) as error:
        log(f"warning: {FLOW_FILE} of the current directory is not used: {error}")
        return None


def _known_api(profile_url: str | None) -> PrefectApi | None:
    """Return the named API, or else our own server if its process lives; starts nothing."""
    named = external_url(profile_url)
    return PrefectApi(named, is_ours=False) if named else own_api()


def _can_report_to(api: PrefectApi) -> bool:
    """Whether it answers; our servers of older versions, which let every user in, are not used."""
    return bool(api.auth or not api.is_ours) and is_healthy(api.url)


def _why_refused(error: Exception) -> str:
    """Say what may be wrong with an API that answers but takes no flow run."""
    if getattr(getattr(error, "response", None), "status_code", None) in (401, 403):
        return "set PREFECT_API_AUTH_STRING, or PREFECT_API_KEY of Prefect Cloud"
    return "its database may be locked, read-only or full"


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
