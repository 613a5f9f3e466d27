"""Bring one run from its directory to its end: the main thread's part.

Looks for cancel.json, and keeps the run's records while the flow runs in a thread of its own,
because Prefect would take the main thread's signals and may wait long for a server that is
gone. Where the flow is lost, the stages go on here without it.
"""

from __future__ import annotations

import importlib
import os
import threading
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from redco_flow.orchestrate.flow_thread import FlowThread
from redco_flow.orchestrate.launch_record import LaunchRecord
from redco_flow.orchestrate.planning import Plan
from redco_flow.orchestrate.run_context import RunContext, Say
from redco_flow.orchestrate.session import Outcome, RunSession
from redco_flow.orchestrate.state_book import StateBook
from redco_flow.orchestrate.stopping import StopRequest
from redco_flow.spec.load import Origin, load_pipeline
from redco_flow.spec.profile import Profile
from redco_flow.tracking.run_directory import RunDirectory
from redco_flow.tracking.states import State
from redco_flow.tracking.workspace import Workspace

_POLL_SECONDS = 0.2


def drive(session: RunSession, flow: FlowThread, say: Say) -> Outcome:
    """Bring the stages to their end and write the run's end."""
    # Before Prefect, which may take its time: from here on nothing of a run ahead needs us.
    _wait_heeding(session, lambda: session.submit_ahead(say))
    flow.start()
    while not session.stages_ended.wait(_POLL_SECONDS):
        _heed_requests(session)
        if session.context.stop.is_set and not session.has_begun:
            break  # Prefect is still waiting for a server
    if session.runnable:
        _go_on_without_flow(session, say)
    outcome = session.outcome()
    _close(session, outcome, say)
    return outcome


def _go_on_without_flow(session: RunSession, say: Say) -> None:
    """Do what the flow has not: run the stages or, when the run is to stop, end their jobs."""
    if not session.context.stop.is_set:
        session.context.book.note("flow_lost", message="the stages go on without a Prefect flow")
        say("the Prefect flow is lost; the stages go on without it.")
    _wait_heeding(session, lambda: session.run_without_flow(say))


def _wait_heeding(session: RunSession, action: Callable[[], None]) -> None:
    """Let a thread do something; requests to stop reach the stages meanwhile."""
    ended = _in_thread(action)
    while not ended.wait(_POLL_SECONDS):
        _heed_requests(session)


def _heed_requests(session: RunSession) -> None:
    """See to it that a signal, or cancel.json, reaches the stages."""
    run, stop = session.context.run, session.context.stop
    stop.act_on_signal()
    if run.cancel_requested() and stop.kind != "cancel":
        session.context.book.note("cancel_requested")
        stop.cancel("`redco-flow cancel`")


def _in_thread(action: Callable[[], None]) -> threading.Event:
    """Begin `action` in a thread; return what is set when it has ended."""
    ended = threading.Event()

    def act() -> None:
        try:
            action()
        finally:
            ended.set()

    threading.Thread(target=act, daemon=True).start()
    return ended


def open_session(
    run: RunDirectory,
    book: StateBook,
    stop: StopRequest,
    *,
    leave_cancelled: bool,
    judges_ended: bool = False,
) -> RunSession:
    """Read what is to be done from the run's directory alone."""
    record = LaunchRecord.read(run)
    profile = Profile.from_json(record.profile)
    # Read back from the resolved file, but each value still comes from where the user wrote it.
    origins = {key: Origin(**one) for key, one in run.read_origins().items()}
    pipeline = replace(load_pipeline(run.resolved_path), origins=origins)
    context = RunContext(
        run=run,
        workspace=Workspace(Path(record.workspace)),
        pipeline=pipeline,
        profile=profile.model_copy(update={"workspace": record.workspace}),
        plan=Plan.from_json(run.read_plan()),
        book=book,
        stop=stop,
        slots=threading.BoundedSemaphore(profile.max_parallel_stages),
        environment=dict(os.environ),
        code=run.record["code"],
        ahead=record.ahead,
    )
    return RunSession(context, leave_cancelled=leave_cancelled, judges_ended=judges_ended)


def _close(session: RunSession, outcome: Outcome, say: Say) -> None:
    """Write the run's end, then its report; who waits for the report waits for the lease's end."""
    context = session.context
    if outcome.state is State.DETACHED:
        context.book.note("detached", reason=outcome.message)
        say(f"{outcome.message}: jobs run on; `redco-flow resume {context.run.id}`.")
        return
    context.book.close_run(outcome.state, outcome.exit_code, outcome.message)
    _write_report(context, say)
    context.run.clear_cancel()
    say(f"{outcome.state}: {outcome.message}")


def _write_report(context: RunContext, say: Say) -> None:
    """Write the run's page; a run is no failure because its page cannot be written."""
    try:
        # By name: the report and the orchestrator know each other's files, not each other.
        build = importlib.import_module("redco_flow.report.build")
        build.build_report(context.run, context.workspace)
    except Exception:  # noqa: BLE001 (whatever it is, it is told and the run has its end)
        say(f"warning: the report could not be written:\n{traceback.format_exc()}")
