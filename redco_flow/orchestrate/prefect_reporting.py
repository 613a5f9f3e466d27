"""What Prefect is told of a run that is driven here, and what it is asked.

The flow run is made before the flow starts (its id is then known for the page's address, for
cancelling and for `open_flow_runs`) and carries the tags: a tag on a task would make it ask the
server for a slot, and a dead server would then stop the run. Every call here may fail without
harm: Prefect is a view.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any
from uuid import UUID

from redco_flow.orchestrate.open_flow_runs import OpenFlowRun
from redco_flow.orchestrate.prefect_api import PrefectApi, ui_url
from redco_flow.orchestrate.prefect_server import prefect_directory
from redco_flow.orchestrate.session import RunSession
from redco_flow.orchestrate.summary import headline, run_summary, summary_key
from redco_flow.tracking.run_directory import RunDirectory

if TYPE_CHECKING:
    from prefect import Flow
    from prefect.client.schemas import FlowRun

_SECONDS_BETWEEN_LOOKS = 2.0
_SECONDS_TO_ANSWER = 10.0


def prepare_environment(api: PrefectApi) -> None:
    """Set what Prefect reads when it is imported; call it before."""
    settings = {
        "DO_NOT_TRACK": "1",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
        "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
        "PREFECT_LOGGING_COLORS": "false",
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
            hosts = [os.environ.get(name), "127.0.0.1", "localhost"]
            os.environ[name] = ",".join(filter(None, hosts))
    os.environ["PREFECT_API_URL"] = api.url


def create_flow_run(
    flow: Flow[Any, Any], run: RunDirectory, api: PrefectApi, *, tags: Sequence[str]
) -> tuple[FlowRun, OpenFlowRun]:
    """Make the run's flow run at the API and note that it is open.

    Args:
        tags: the pipeline's own; the profile's is added.

    Raises:
        Exception: whatever Prefect's client raises when the API does not take it within half a
            minute.
    """
    from prefect.client.orchestration import get_client
    from prefect.settings import (
        PREFECT_API_REQUEST_TIMEOUT,
        PREFECT_CLIENT_MAX_RETRIES,
        temporary_settings,
    )
    from prefect.states import Pending

    given = run.record
    parameters = {
        "pipeline": given["pipeline_path"],
        "profile": given["profile"],
        "overrides": given["overrides"],
    }
    all_tags = ["redco-flow", f"profile: {given['profile']}", *tags]
    # Jobs wait for this, and a server whose database is locked would have them wait for minutes.
    patience = {PREFECT_API_REQUEST_TIMEOUT: _SECONDS_TO_ANSWER, PREFECT_CLIENT_MAX_RETRIES: 1}
    with temporary_settings(patience), get_client(sync_client=True) as client:
        flow_run = client.create_flow_run(
            flow, parameters=parameters, name=run.id, tags=all_tags, state=Pending()
        )
    return flow_run, OpenFlowRun.note(str(flow_run.id), run, api)


def page_of(flow_run: FlowRun, api: PrefectApi) -> str | None:
    """Return the address of the flow run's page; None with a short-lived API, which has none."""
    return None if api.is_short_lived else f"{ui_url(api.url)}/runs/flow-run/{flow_run.id}"


def publish_summary(session: RunSession) -> None:
    """Put the run's summary on its page; what fails now is tried again after the flow."""
    from prefect.artifacts import create_markdown_artifact
    from prefect.logging import get_run_logger
    from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings

    run, workspace = session.context.run, session.context.workspace
    try:
        with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 1}):
            create_markdown_artifact(
                run_summary(run, workspace), key=summary_key(run), description=headline(run)
            )
        session.summary_is_published = True
    except Exception as error:  # noqa: BLE001 (the server may be gone, a manifest damaged)
        get_run_logger().warning("the summary could not be published: %r", error)


def watch_for_cancelling(flow_run_id: UUID, on_cancel: Callable[[str], None]) -> threading.Event:
    """Ask now and then whether the flow run was cancelled on its page.

    Prefect tells the flow of that only if the flow was started by one of its own workers.

    Returns:
        An event that ends the asking.
    """
    done = threading.Event()

    def look() -> None:
        from prefect.client.orchestration import get_client
        from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings

        with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}):
            with get_client(sync_client=True) as client:
                while not done.wait(_SECONDS_BETWEEN_LOOKS):
                    with contextlib.suppress(Exception):  # a server that is away has no news
                        state = client.read_flow_run(flow_run_id).state
                        if state and (state.is_cancelling() or state.is_cancelled()):
                            on_cancel("cancelled on its Prefect page")
                            return

    threading.Thread(target=look, name="watch-for-cancelling", daemon=True).start()
    return done
