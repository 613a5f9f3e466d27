"""Drive runs in this process: take each one's lease, bring its stages to their end, write its end.

Used by the process of one run (`orchestrate.run.orchestrator`) and by that of a sweep
(`orchestrate.sweep.process`). Each run has its threads, its log and its Prefect flow; they share
the imports and Slurm's answers. Prefect is imported only by the threads of flows.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from redco_flow.errors import RedcoFlowError, UsageError
from redco_flow.launch.processes import WARNING_SIGNAL
from redco_flow.launch.redaction import redact_text
from redco_flow.orchestrate.notices import tell_end
from redco_flow.orchestrate.run.cancel import Log, RunContext, StopRequest, pause_after
from redco_flow.orchestrate.run.plan import Plan
from redco_flow.orchestrate.run.session import Outcome, RunSession
from redco_flow.orchestrate.run.state import LaunchRecord, StateStore, note_takeover
from redco_flow.records import open_no_link, write_text
from redco_flow.spec.load import Origin, load_pipeline
from redco_flow.spec.profile import Profile
from redco_flow.spec.secrets import secret_values
from redco_flow.tracking.attempt import ENDED_RUN_STATES, State
from redco_flow.tracking.file_lock import LockLost
from redco_flow.tracking.locks import Lease, acquire
from redco_flow.tracking.process_identity import utc_now
from redco_flow.tracking.run_directory import RunDirectory
from redco_flow.tracking.workspace import Workspace

if TYPE_CHECKING:
    from redco_flow.orchestrate.prefect.flow import FlowThread

LEAVE_CANCELLED = "leave cancelled stages"
"""What the note of a run says whose cancelled stages stay as they are."""

_SECONDS_FOR_PREFECT_TO_CLOSE = 180.0
_POLL_SECONDS = 0.2


class Driver:
    """The runs that this process drives.

    Args:
        notes: a folder that gets a file for each run until its end; what a killed process has left
            there, the next one continues.
        job: the cluster's job that this process is in; "" for none.
    """

    def __init__(self, notes: Path | None = None, job: str = "") -> None:
        self._signal = ""
        self._notes = notes
        self._job = job
        # What jobs inherit is without the settings that Prefect is given later.
        self._environment = dict(os.environ)
        self._mutex = threading.Lock()
        self._runs: list[DrivenRun] = []
        self._an_end = threading.Event()

    def take_signals(self) -> None:
        """Detach from all runs at SIGTERM, SIGINT or SIGHUP; call it in the main thread.

        In a job, also at the warning before the end of its time.
        """
        warning = [signal.Signals[f"SIG{WARNING_SIGNAL}"]] if self._job else []
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, *warning):
            signal.signal(number, self._on_signal)

    def start(
        self, run: RunDirectory, *, leave_cancelled: bool = False, judges_ended: bool = False
    ) -> DrivenRun:
        """Take a run's lease and drive it in threads; the options are those of `RunSession`.

        Raises:
            UsageError: the run has an orchestrator, or has ended.
            DamagedRecord: its lease or state cannot be read.
            OSError: its directory cannot be written; names the path.
        """
        note = self._notes / run.id if self._notes is not None else None
        lease = acquire(run, job=self._job, on_lost=self._on_lost, on_wait=_write_line)
        try:
            # Who starts a run makes it pending first; it may be cancelled meanwhile.
            if (state := run.read_state()["state"]) in ENDED_RUN_STATES:
                raise UsageError(f"run {run.id} has ended already: it is {state}.")
            driven = DrivenRun(run, lease, self._environment, self._an_end, note)
            with self._mutex:
                driven.start(leave_cancelled=leave_cancelled, judges_ended=judges_ended)
                self._runs.append(driven)
        except BaseException:  # no thread, no file descriptor: the run is left as it was
            lease.release()
            raise
        return driven

    @property
    def num_driving(self) -> int:
        """The number of runs that have not ended."""
        return sum(not one.has_ended for one in self._runs)

    @property
    def has_runs(self) -> bool:
        """Whether a run has not ended, or its notices and its flow are not done with."""
        with self._mutex:
            self._runs = [one for one in self._runs if one.is_alive]
            return bool(self._runs)

    def wait_for_an_end(self, seconds: float) -> None:
        """Wait until a run ends, but not longer than `seconds`; pass a signal on to the runs."""
        self._an_end.wait(seconds)
        self._an_end.clear()
        if self.is_stopped:
            for one in list(self._runs):
                one.stop.detach(f"got {self._signal}")

    @property
    def is_stopped(self) -> bool:
        """Whether a signal has come."""
        return bool(self._signal)

    def wait(self) -> None:
        """Return when all runs have ended, their notices are sent and their flows are closed."""
        while self.has_runs:
            self.wait_for_an_end(_POLL_SECONDS)

    def _on_lost(self, error: LockLost) -> None:
        self._signal = str(error)  # another process drives the run

    def _on_signal(self, number: int, frame: object) -> None:
        self._signal = signal.Signals(number).name  # a handler, which may touch no lock


def _write_line(text: str) -> None:
    sys.stderr.write(f"{utc_now()} {text}\n")
    sys.stderr.flush()


class DrivenRun:
    """One run, whose lease this process holds until the run has ended.

    Args:
        lease: the run's.
        environment: what its jobs inherit.
        an_end: is set when the run has ended.
        note: a file that is there until then.

    Attributes:
        exit_code: of the run, once it has ended.
    """

    def __init__(
        self,
        run: RunDirectory,
        lease: Lease,
        environment: Mapping[str, str],
        an_end: threading.Event,
        note: Path | None = None,
    ) -> None:
        self.stop = StopRequest()
        self.exit_code = 1
        self.has_ended = False
        self._run = run
        self._lease = lease
        self._environment = environment
        self._an_end = an_end
        self._note = note
        self._log = RunLog(run)
        self._thread: threading.Thread | None = None

    def start(self, *, leave_cancelled: bool, judges_ended: bool) -> None:
        """Drive the run in a thread."""
        if self._note is not None:
            with suppress(OSError):  # of a full or read-only home: the note is an aid only
                self._note.parent.mkdir(parents=True, exist_ok=True)
                write_text(self._note, LEAVE_CANCELLED if leave_cancelled else "")
        options = {"leave_cancelled": leave_cancelled, "judges_ended": judges_ended}
        self._thread = threading.Thread(
            target=self._main, kwargs=options, name=self._run.id, daemon=True
        )
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether it is still driven, or its notices and its flow are not done with."""
        return self._thread is not None and self._thread.is_alive()

    def _main(self, **options: bool) -> None:
        try:
            self._bring_to_end(**options)
        finally:
            self._set_ended()
            self._log.close()

    def _bring_to_end(self, **options: bool) -> None:
        run = self._run
        try:
            with self._lease:
                self.exit_code, flow = self._drive(**options)
                ended = run.read_state()
        except RedcoFlowError as error:
            self._log(str(error))
            self.exit_code = error.exit_code
            return
        except OSError as error:  # of a record: only the log can still tell it
            self._log(
                f"{error.filename or run.path} cannot be written ({error.strerror or error}): the "
                f"run is no longer followed; jobs run on, and what is recorded stays. Make it "
                f"writable, or free space, then `redco-flow resume {run.id}`."
            )
            return
        # The lease is released: nothing waits for what follows, and new attempts that the run may
        # get meanwhile change its state, not this end.
        self._set_ended()
        tell_end(run, self._log, state=ended)
        if flow is not None:
            flow.close(_SECONDS_FOR_PREFECT_TO_CLOSE)

    def _set_ended(self) -> None:
        if self._note is not None and not self.has_ended:
            with suppress(OSError):
                self._note.unlink(missing_ok=True)
        self.has_ended = True
        self._an_end.set()

    def _drive(self, *, leave_cancelled: bool, judges_ended: bool) -> tuple[int, FlowThread | None]:
        """Return the exit code, and the flow where there is one to close.

        Raises:
            OSError: the run's records cannot be written; names the path.
        """
        note_takeover(self._run, self._lease)
        # An earlier start of this job has opened the run: what has failed since is not tried again.
        is_continued = bool(self._lease.job) and self._run.read_state()["state"] == State.RUNNING
        state_store = StateStore(self._run)
        try:
            # Imported now, so that who started this process sees the lease at once. submitit
            # configures logging when it is imported, which closes every handler: once Prefect
            # has its own, that can wait for ever on a lock.
            importlib.import_module("redco_flow.launch.executor")
            from redco_flow.orchestrate.prefect.flow import FlowThread

            session = open_session(
                self._run,
                state_store,
                self.stop,
                environment=self._environment,
                leave_cancelled=leave_cancelled,
                judges_ended=judges_ended or is_continued,
                keeps_ended=is_continued,
            )
            flow = FlowThread(session, self._log)
            return drive(session, flow, self._log).exit_code, flow
        except (Exception, SystemExit) as error:  # noqa: BLE001 (the run's files must say it)
            self._log(traceback.format_exc())
            code = error.exit_code if isinstance(error, RedcoFlowError) else 1
            state_store.close_run(State.FAILED, code, _told(error))
            return code, None
        finally:
            state_store.leave()


class RunLog:
    """A run's orchestrator.log: each line with its time and without secrets."""

    def __init__(self, run: RunDirectory) -> None:
        self._file = open(run.log_path, "ab", buffering=0, opener=open_no_link)  # noqa: SIM115
        self._secrets = secret_values(os.environ)
        self._mutex = threading.Lock()

    def __call__(self, line: str) -> None:
        """Write a line; a thread that ends after the log was closed writes no more."""
        text = redact_text(f"{utc_now()} {line}\n", self._secrets)
        with self._mutex:
            if not self._file.closed:
                self._file.write(text.encode("utf-8", "backslashreplace"))

    def close(self) -> None:
        """Close the file."""
        with self._mutex:
            self._file.close()


def _told(error: BaseException) -> str:
    """Describe an error in the run's message; our own errors need no traceback."""
    if isinstance(error, RedcoFlowError):
        return str(error)
    return f"the run could not be driven: {type(error).__name__}: {error}"


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
    ended, since = _in_thread(action), time.monotonic()
    while not ended.wait(pause_after(since)):
        _heed_requests(session)


def _heed_requests(session: RunSession) -> None:
    """See to it that cancel.json reaches the stages; signals are the driver's."""
    run, stop = session.context.run, session.context.stop
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
    keeps_ended: bool = False,
    environment: Mapping[str, str] = os.environ,
) -> RunSession:
    """Read what is to be done from the run's directory alone.

    Args:
        environment: what jobs inherit.
    """
    record = LaunchRecord.read(run)
    profile = Profile.from_record(record.profile)
    # Read back from the resolved file, but each value still comes from where the user wrote it.
    origins = {key: Origin(**one) for key, one in run.read_origins().items()}
    own = {stage: Profile.from_record(one) for stage, one in record.stage_profiles.items()}
    pipeline = replace(load_pipeline(run.resolved_path), origins=origins, profiles=own)
    context = RunContext(
        run=run,
        workspace=Workspace(Path(record.workspace)),
        pipeline=pipeline,
        profile=profile.model_copy(update={"workspace": record.workspace}),
        plan=Plan.from_json(run.read_plan()),
        state_store=state_store,
        stop=stop,
        slots=threading.BoundedSemaphore(profile.max_parallel_stages),
        environment=dict(environment),
        code=run.record["code"],
        ahead=record.ahead,
    )
    return RunSession(
        context,
        leave_cancelled=leave_cancelled,
        judges_ended=judges_ended,
        keeps_ended=keeps_ended,
    )


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
    """Write the run's page, unless it is a sweep's point; the run does not fail by its page."""
    if context.run.record.get("sweep"):
        return
    try:
        # By name: the report and the orchestrator know each other's files, not each other.
        build = importlib.import_module("redco_flow.report.page")
        build.build_report(context.run, context.workspace)
    except Exception:  # noqa: BLE001 (any error is reported, and the run has its end)
        log(f"warning: the report could not be written:\n{traceback.format_exc()}")
