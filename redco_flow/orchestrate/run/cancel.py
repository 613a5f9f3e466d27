"""Stop runs from any process: ask their launchers, and end the jobs of those that have none."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from redco_flow.errors import RunCancelled, UsageError
from redco_flow.launch.endings import never_began, write_exit
from redco_flow.orchestrate.run.launcher import give_up_launcher_job
from redco_flow.orchestrate.run.state import StateStore, note_takeover
from redco_flow.tracking.attempt import ENDED_RUN_STATES, ENDED_STAGE_STATES, Cause, State
from redco_flow.tracking.locks import Lease, acquire, find_holder
from redco_flow.tracking.run_directory import RunDirectory
from redco_flow.tracking.sweep_directory import SweepDirectory
from redco_flow.tracking.typed_records import unless_damaged
from redco_flow.tracking.workspace import Workspace

if TYPE_CHECKING:
    from redco_flow.launch.executor import CallJob
    from redco_flow.orchestrate.run.plan import Plan
    from redco_flow.spec.load import ResolvedPipeline
    from redco_flow.spec.profile import Profile


StopKind = Literal["cancel", "detach"]

_SECONDS_OF_SHORT_PAUSES = 60.0
_SHORT_PAUSE, _LONG_PAUSE = 0.25, 1.0

_POLL_SECONDS = 0.1
_NUM_ASKED_AT_ONCE = 16


def pause_after(since: float) -> float:
    """Return the seconds to wait before the next look at something that nothing announces.

    Jobs run for days: what has not changed for a minute is looked at once a second.

    Args:
        since: when the wait began, on the monotonic clock.
    """
    is_short = time.monotonic() - since < _SECONDS_OF_SHORT_PAUSES
    return _SHORT_PAUSE if is_short else _LONG_PAUSE


class Detached(BaseException):
    """The orchestrating process stops following its jobs, which run on.

    Not an `Exception`: nothing between here and the process's end may take it for a failure.
    """


class StopRequest:
    """Set once by a signal handler or a poller, waited for by all others."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self.kind: StopKind | None = None
        self.reason = ""

    def cancel(self, reason: str) -> None:
        """Ask for the run's jobs to be ended."""
        if self.kind != "cancel":
            self.kind, self.reason = "cancel", reason
        self._event.set()

    def detach(self, reason: str) -> None:
        """Ask only this process to end."""
        if self.kind is None:
            self.kind, self.reason = "detach", reason
        self._event.set()

    def wait(self, seconds: float) -> bool:
        """Sleep, but not longer than until a request; return whether there is one."""
        return self._event.wait(seconds)

    def raise_if_set(self, stage: str) -> None:
        """Raise once a stop was asked for.

        Args:
            stage: what does not go on, for the message.

        Raises:
            RunCancelled: the jobs are to end too.
            Detached: only this process is to end.
        """
        if self.kind == "detach":
            raise Detached(self.reason)
        if self.kind == "cancel":
            raise RunCancelled(f"stage '{stage}' was cancelled: {self.reason}")

    @property
    def is_set(self) -> bool:
        """Whether a stop was asked for."""
        return self.kind is not None


Log = Callable[[str], None]
"""Takes one line for people: a job's log line, or what the orchestrator does."""


@dataclass(frozen=True)
class RunContext:
    """One run as the process that holds its lease sees it.

    Args:
        slots: as many jobs at a time as the profile allows.
        environment: what jobs inherit: this process's as it was before Prefect's settings.
        code: commit and whether it is dirty, for the records.
        ahead: all stages' jobs are submitted at once, each dependent on its upstream.
    """

    run: RunDirectory
    workspace: Workspace
    pipeline: ResolvedPipeline
    profile: Profile
    plan: Plan
    state_store: StateStore
    stop: StopRequest
    slots: threading.BoundedSemaphore
    environment: Mapping[str, str]
    code: dict[str, Any] = field(default_factory=dict)
    ahead: bool = False

    def profile_of(self, stage: str) -> Profile:
        """Return the stage's own profile, or the run's."""
        return self.pipeline.profile_of(stage, self.profile)


def cancel_run(run: RunDirectory, reason: str = "") -> None:
    """Ask for the run to stop and wait for its end; without an orchestrator, end its jobs here.

    Args:
        reason: for people.

    Raises:
        UsageError: it has ended already.
    """
    state = run.read_state()["state"]
    if state in ENDED_RUN_STATES:
        raise UsageError(f"run {run.id} has ended already: it is {state}.")
    cancel_runs([run], reason)


def cancel_runs(runs: Iterable[RunDirectory], reason: str = "") -> None:
    """Ask for all these runs to stop, then wait for their ends together; as `cancel_run`.

    One that has ended already is left as it is.
    """
    left = [run for run in runs if not has_ended(run)]
    for run in left:
        run.request_cancel(reason)
    ends: list[_EndWithoutLauncher] = []
    unseen: set[str] = set()
    with ExitStack() as leases, ThreadPoolExecutor(_NUM_ASKED_AT_ONCE) as pool:
        while left:
            undriven = [run for run in left if not is_driven(run, unseen)]
            begun = pool.map(lambda run: _begin_end(run, reason, leases), undriven)
            ends += [end for end in begun if end is not None]
            ends = [end for end in ends if not end.has_come()]
            left = [run for run in left if not has_ended(run)]
            if left:
                time.sleep(_POLL_SECONDS)


def is_driven(leased: RunDirectory | SweepDirectory, unseen: set[str]) -> bool:
    """Say whether a process drives a run or a sweep, whose end is waited for.

    Args:
        unseen: the runs of which it is reported already that this process cannot be seen from here.
    """
    lease = find_holder(leased)
    if lease is not None and lease.unseen and leased.id not in unseen:
        unseen.add(leased.id)
        sys.stderr.write(f"{leased.id}: waiting for {lease.holder}. {lease.unseen}\n")
    return lease is not None


def has_ended(run: RunDirectory) -> bool:
    """Tell whether a run has its end; one whose state is damaged has none to be brought to."""
    state = unless_damaged(run.read_state)
    return state is None or state["state"] in ENDED_RUN_STATES


def _begin_end(run: RunDirectory, reason: str, leases: ExitStack) -> _EndWithoutLauncher | None:
    """Take a run without an orchestrator, and ask its jobs to stop.

    Args:
        leases: gets what releases the run's lease.

    Returns:
        None where another process has just taken the run up: that one sees the request.
    """
    try:
        lease = leases.enter_context(acquire(run))
    except UsageError:
        if find_holder(run) is None:
            raise
        return None
    note_takeover(run, lease)
    end = _EndWithoutLauncher(run, lease, f"cancelled{f': {reason}' if reason else ''}")
    end.ask()
    return end


class _EndWithoutLauncher:
    """The launcher's part in a run's end, under its lease: end the jobs, write what became of them.

    Args:
        message: for people.
    """

    def __init__(self, run: RunDirectory, lease: Lease, message: str) -> None:
        self._run = run
        self._lease = lease
        self._message = message
        self._state_store = StateStore(run)
        self._jobs: dict[str, CallJob] = {}

    def ask(self) -> None:
        """Ask the run's jobs to stop, unless its launcher was faster than we."""
        from redco_flow.launch.executor import reattach

        give_up_launcher_job(self._run)
        for stage in () if has_ended(self._run) else self._state_store.stages():
            attempt = self._run.latest_attempt(stage)
            if attempt is None or attempt.read_exit() or not (record := attempt.read_job()):
                continue
            self._jobs[stage] = reattach(record)
            self._jobs[stage].cancel(check=False)

    def has_come(self) -> bool:
        """Say whether all jobs have ended; if so, the run has its end and its lease is free."""
        # Every job is looked at: a cluster's word counts some seconds after it was first heard.
        still_there = [job for job in self._jobs.values() if not job.done()]
        if still_there:
            return False
        if not has_ended(self._run):
            self._close()
        self._lease.release()
        return True

    def _close(self) -> None:
        for stage, known in self._state_store.stages().items():
            if stage in self._jobs:
                _note_end(self._jobs[stage], self._message)
            if known["state"] not in ENDED_STAGE_STATES:
                self._state_store.set_stage(stage, State.CANCELLED, message=self._message)
        self._state_store.close_run(State.CANCELLED, RunCancelled.exit_code, self._message)
        self._run.clear_cancel()


def _note_end(job: CallJob, why: str) -> None:
    """Of a job that left the queue without a word, say so where a resumed run looks."""
    if job.attempt.read_exit() is None and job.status().cause is Cause.CANCELLED:
        write_exit(job.attempt, never_began(why))
