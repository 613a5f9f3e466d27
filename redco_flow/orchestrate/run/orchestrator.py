"""The process that drives one run: `python -m redco_flow.orchestrate.run.orchestrator RUN`.

Detached, so it outlives the terminal. Holds the lease, takes signals, and ends with
the run's exit code. The next process on the same directory continues after a kill.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from redco_flow.errors import RedcoFlowError
from redco_flow.launch.redaction import RedactedStream
from redco_flow.orchestrate.notify.notices import tell_end
from redco_flow.orchestrate.prefect.flow import FlowThread
from redco_flow.orchestrate.run.plan import Plan
from redco_flow.orchestrate.run.session import Outcome, RunSession
from redco_flow.orchestrate.run.state import LaunchRecord, StateStore, note_takeover
from redco_flow.orchestrate.run.stopping import Log, RunContext, StopRequest
from redco_flow.spec.load import Origin, load_pipeline
from redco_flow.spec.profile import Profile
from redco_flow.spec.secrets import secret_values
from redco_flow.tracking.attempt import State
from redco_flow.tracking.locks import Lease, acquire
from redco_flow.tracking.process_identity import utc_now
from redco_flow.tracking.run_directory import RunDirectory
from redco_flow.tracking.workspace import Workspace

if TYPE_CHECKING:
    from redco_flow.orchestrate.prefect.flow import FlowThread


_SECONDS_FOR_PREFECT_TO_CLOSE = 180.0
_SECONDS_FOR_PYTHON_TO_CLOSE = 15.0


def main(arguments: Sequence[str]) -> int:
    """Drive the run to its end; return the exit code."""
    options = _parse(arguments)
    run = RunDirectory(options.run)
    try:
        with acquire(run) as lease:
            exit_code, flow = _drive(run, lease, options)
            ended = run.read_state()
    except RedcoFlowError as error:
        log(str(error))
        return error.exit_code
    except OSError as error:  # of a record: only the log can still tell it
        log(
            f"{error.filename or run.path} cannot be written ({error.strerror or error}): this "
            f"process ends; jobs run on, and what is recorded stays. Make it writable, or free "
            f"space, then `redco-flow resume {run.id}`."
        )
        return 1
    # The run has ended and has let go of its lease: no one waits for what follows, and who gives
    # it new attempts meanwhile changes its state, not what this end was.
    tell_end(run, log, state=ended)
    if flow is not None:
        flow.close(_SECONDS_FOR_PREFECT_TO_CLOSE)
    return exit_code


def _drive(
    run: RunDirectory, lease: Lease, options: argparse.Namespace
) -> tuple[int, FlowThread | None]:
    """Return the exit code, and the flow where there is one to close.

    Raises:
        OSError: the run's records cannot be written; names the path.
    """
    note_takeover(run, lease)
    state_store = StateStore(run)
    stop = StopRequest()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, stop.on_signal)
    try:
        # Imported now, so that the process that started this one sees the lease at once. submitit
        # configures logging when it is imported, which closes every handler: once Prefect
        # has its own, that can wait for ever on a lock.
        importlib.import_module("redco_flow.launch.executor")
        from redco_flow.orchestrate.prefect.flow import FlowThread

        session = open_session(
            run,
            state_store,
            stop,
            leave_cancelled=options.leave_cancelled,
            judges_ended=options.judge_ended,
        )
        flow = FlowThread(session, log)
        return drive(session, flow, log).exit_code, flow
    except (Exception, SystemExit) as error:  # noqa: BLE001 (the run's files must say it)
        log(traceback.format_exc())
        code = error.exit_code if isinstance(error, RedcoFlowError) else 1
        state_store.close_run(State.FAILED, code, _told(error))
        return code, None
    finally:
        state_store.leave()


def _told(error: BaseException) -> str:
    """Describe an error in the run's message; our own errors need no traceback."""
    if isinstance(error, RedcoFlowError):
        return str(error)
    return f"the run could not be driven: {type(error).__name__}: {error}"


def log(line: str) -> None:
    """Write one line to orchestrator.log, which is this process's standard error."""
    sys.stderr.write(f"{utc_now()} {line}\n")
    sys.stderr.flush()


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="redco_flow.orchestrate.run.orchestrator")
    parser.add_argument("run", type=Path)
    parser.add_argument("--leave-cancelled", action="store_true")
    parser.add_argument("--judge-ended", action="store_true")
    return parser.parse_args(arguments)


def _exit(code: int) -> None:
    """End the process; Prefect's own threads may wait for a lost server only so long."""
    late = threading.Timer(_SECONDS_FOR_PYTHON_TO_CLOSE, os._exit, [code])
    late.daemon = True
    late.start()
    sys.exit(code)


_POLL_SECONDS = 0.2


def drive(session: RunSession, flow: FlowThread, log: Log) -> Outcome:
    """Bring the stages to their end and write the run's end."""
    # Before Prefect, which may take its time: a run ahead needs no orchestrator from here on.
    _wait_heeding(session, lambda: session.submit_ahead(log))
    session.flow_decides = flow.decides
    flow.start()
    if flow.decides:
        _follow_flow(session, log)
    else:
        _wait_heeding(session, lambda: session.run_stages(log))
    outcome = session.conclude()
    _close(session, outcome, log)
    return outcome


def _follow_flow(session: RunSession, log: Log) -> None:
    """Wait for a flow of the user's own, which decides which stage runs when."""
    while not session.stages_ended.wait(_POLL_SECONDS):
        _heed_requests(session)
        if session.context.stop.is_set and not session.has_begun:
            break  # Prefect is still waiting for a server
    if not session.runnable:
        return
    if not session.context.stop.is_set:
        session.context.state_store.note(
            "flow_lost", message="the stages continue without a Prefect flow"
        )
        log("the Prefect flow is lost; the stages continue without it.")
    _wait_heeding(session, lambda: session.run_stages(log))


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
        session.context.state_store.note("cancel_requested")
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
    state_store: StateStore,
    stop: StopRequest,
    *,
    leave_cancelled: bool,
    judges_ended: bool = False,
) -> RunSession:
    """Read what is to be done from the run's directory alone."""
    record = LaunchRecord.read(run)
    profile = Profile.from_record(record.profile)
    # Read back from the resolved file, but each value still comes from where the user wrote it.
    origins = {key: Origin(**one) for key, one in run.read_origins().items()}
    pipeline = replace(load_pipeline(run.resolved_path), origins=origins)
    context = RunContext(
        run=run,
        workspace=Workspace(Path(record.workspace)),
        pipeline=pipeline,
        profile=profile.model_copy(update={"workspace": record.workspace}),
        plan=Plan.from_json(run.read_plan()),
        state_store=state_store,
        stop=stop,
        slots=threading.BoundedSemaphore(profile.max_parallel_stages),
        environment=dict(os.environ),
        code=run.record["code"],
        ahead=record.ahead,
    )
    return RunSession(context, leave_cancelled=leave_cancelled, judges_ended=judges_ended)


def _close(session: RunSession, outcome: Outcome, log: Log) -> None:
    """Write the run's end, then its report; who waits for the report waits for the lease's end."""
    context = session.context
    if outcome.state is State.DETACHED:
        context.state_store.note("detached", reason=outcome.message)
        log(f"{outcome.message}: jobs run on; `redco-flow resume {context.run.id}`.")
        return
    context.state_store.close_run(outcome.state, outcome.exit_code, outcome.message)
    _write_report(context, log)
    context.run.clear_cancel()
    log(f"{outcome.state}: {outcome.message}")


def _write_report(context: RunContext, log: Log) -> None:
    """Write the run's page; a run is no failure because its page cannot be written."""
    try:
        # By name: the report and the orchestrator know each other's files, not each other.
        build = importlib.import_module("redco_flow.report.page")
        build.build_report(context.run, context.workspace)
    except Exception:  # noqa: BLE001 (any error is reported, and the run has its end)
        log(f"warning: the report could not be written:\n{traceback.format_exc()}")


if __name__ == "__main__":
    # The run's flow is the user's code, and so are the errors that it raises.
    sys.stdout = sys.stderr = RedactedStream(sys.stderr, secret_values(os.environ))
    _exit(main(sys.argv[1:]))
