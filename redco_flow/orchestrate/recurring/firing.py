"""Execute one firing of a schedule: start a run or skip it, and record the result.

Runs in a thread of the process that serves schedules. The run itself is an ordinary one, started
by the ordinary command and driven by another, detached process, so the end of this process loses
nothing: the next one that is given the same firing finds its record and continues it.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from redco_flow.errors import RedcoFlowError, UsageError
from redco_flow.orchestrate.notices import Notice, tell_at_once, without_secrets
from redco_flow.orchestrate.prefect.server import external_url
from redco_flow.orchestrate.recurring.serving_record import Serving
from redco_flow.spec.notify import NotifySection
from redco_flow.spec.profile import LOCAL_LAUNCHER
from redco_flow.tracking.attempt import ENDED_RUN_STATES, State
from redco_flow.tracking.locks import find_holder
from redco_flow.tracking.process_identity import utc_now
from redco_flow.tracking.run_directory import RunDirectory, new_run_id
from redco_flow.tracking.schedules import Firing, FiringState, ScheduleDirectory
from redco_flow.tracking.typed_records import unless_damaged
from redco_flow.tracking.workspace import Workspace

SECONDS_LATE = 60.0
"""A firing that begins later than this was missed, unless something served when it was due."""

_POLL_SECONDS = 0.5
_SECONDS_WITHOUT_LAUNCHER = 5.0
_MOST_RESUMES = 3
_ENDS = {
    State.COMPLETED: FiringState.COMPLETED,
    State.FAILED: FiringState.FAILED,
    State.CANCELLED: FiringState.CANCELLED,
}

Log = Callable[[str], None]


@dataclass(frozen=True)
class Terms:
    """The parameters of a flow run, which may have been edited in Prefect's UI.

    Args:
        schedule: its name.
        workspace: where its records are.
        pipeline, profile, overrides: as for `redco-flow run`.
        overlap, missed, retries: see `spec.schedule.ScheduleSection`.
        folder: where the commands of a firing run; None: in this process's directory.
        environment: variables of these commands.
    """

    schedule: str
    workspace: Path
    pipeline: str
    profile: str
    overrides: tuple[str, ...]
    overlap: str
    missed: str
    retries: int
    folder: Path | None = None
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def words(self) -> list[str]:
        """Arguments after the verb on the command line."""
        return [self.pipeline, "-p", self.profile, *self.overrides]


class CannotFire(RedcoFlowError):
    """The pipeline could not be planned or started; the message says why."""


class Firer:
    """Brings one firing to its end.

    Args:
        terms: what it was given.
        later_is_due: whether a firing of the schedule that was due after this one is due by now.
        log: takes lines for the firing's page.
        stop: set when a user has cancelled it.
    """

    def __init__(
        self,
        terms: Terms,
        later_is_due: Callable[[], bool],
        log: Log,
        stop: threading.Event,
    ) -> None:
        self._terms = terms
        self._later_is_due = later_is_due
        self._log = log
        self._stop = stop
        self._directory = ScheduleDirectory.of(Workspace(terms.workspace), terms.schedule)

    def fire(self, firing_id: str, due: datetime) -> Firing:
        """Bring a firing to its end, or take one up whose process is gone; return it.

        One that has ended as failed or cancelled is given new attempts: a user asked for that.
        """
        new = new_firing(firing_id, due)
        firing, is_retry = self._directory.claim(new)
        if firing is None:
            return self._directory.find_firing(firing_id) or new
        try:
            if not firing.has_started_run:
                firing = self._begin(firing)
            elif is_retry or firing.state == FiringState.WAITING:  # for its turn to be retried
                firing = self._begin_again(firing)
            return firing if firing.has_ended else self._follow(firing)
        except (RedcoFlowError, OSError) as error:
            present = self._directory.find_firing(firing_id)
            if isinstance(error, OSError) and present is not None and present.has_started_run:
                raise  # the run may go on: its end is noted later
            failed = self._end(firing, FiringState.FAILED, str(error))
            if not failed.has_started_run:  # the run itself sends the notice of its end
                self._tell(failed)
            return failed

    def _tell(self, failed: Firing) -> None:
        """Tell of a firing that started no run whom its pipeline's `notify` named."""
        schedule = unless_damaged(self._directory.read)
        if schedule is None or not schedule.notify:
            return
        section = NotifySection.from_json(schedule.notify)
        if "failure" in section.events:
            pages = shlex.join(["redco-flow", "schedule", "history", schedule.name])
            facts = {"schedule": schedule.name, "pipeline": schedule.pipeline, "due": failed.due}
            notice = Notice(
                event="failure",
                key=f"failure of {failed.id}",
                title=f"schedule {schedule.name}: the firing of {failed.due} started no run",
                text=f"{without_secrets(failed.reason)}\nall firings: {pages}",
                facts=facts,
            )
            tell_at_once(notice, section, self._log)

    def _begin(self, firing: Firing) -> Firing:
        """Start the run, or end the firing where there is to be none."""
        is_late = _is_late(firing)
        if is_late and (reason := self._why_not_made_up(firing)):
            return self._end(firing, FiringState.SKIPPED, reason)
        makes_up = is_late and self._terms.missed == "all"
        overlap = "wait" if makes_up else self._terms.overlap
        firing = self._wait_for_turn(firing, overlap, is_late=is_late)
        if firing.has_ended:
            return firing
        return self._start(firing)

    def _start(self, firing: Firing) -> Firing:
        """Start the run of a firing, once, whatever is killed on the way, if something is new.

        Its id is on record before it is started, so that a process that takes the firing up finds
        the run, and a command that outlives its process cannot start a second one.
        """
        run = firing.run or new_run_id(self._terms.schedule)
        path = Workspace(self._terms.workspace).runs / run
        firing = self._directory.write_firing(replace(firing, run=run, run_path=str(path)))
        good = [one for one in self._directory.firings() if one.state == FiringState.COMPLETED]
        since = ("--since", good[-1].identity) if good and good[-1].identity else ()
        try:
            # Serving is a process of this machine anyway, which looks at the run's own process.
            options = ("--launcher", LOCAL_LAUNCHER, "--detach", "--json", "--run-id", run)
            options += ("--if-new", "--no-fit", *since)
            started = self._ask("run", *self._terms.words, *options)
        except CannotFire:
            if not firing.has_started_run:
                raise
        else:
            firing = replace(firing, identity=str(started["identity"]))
            if started["run"] is None:
                why = f" since {good[-1].run}" if good else ": every stage has its result already"
                nothing = replace(firing, run="", run_path="")
                return self._end(nothing, FiringState.SKIPPED, f"data unchanged{why}")
            path = Path(started["path"])  # the profile may name another workspace by now
            firing = self._directory.write_firing(replace(firing, run_path=str(path)))
        self._log(f"run {run} started; its files: {path}")
        return firing

    def _begin_again(self, firing: Firing) -> Firing:
        """Give the run of a firing that had ended new attempts, when it is its turn."""
        firing = self._wait_for_turn(firing, "wait")
        if not firing.has_ended:
            self._continue("retry", RunDirectory(Path(firing.run_path)))
        return firing

    def _why_not_made_up(self, firing: Firing) -> str:
        if self._terms.missed == "skip":
            return f"it was due at {firing.due}, when nothing served"
        if self._terms.missed == "latest" and self._later_is_due():
            return f"it was due at {firing.due}, when nothing served; a later one is made up for"
        return ""

    def _wait_for_turn(self, firing: Firing, overlap: str, *, is_late: bool = False) -> Firing:
        """Return the firing when it may run, or as it ended by the policy of overlaps.

        Args:
            overlap: that policy, or `wait`, however many firings are before this one.
            is_late: those before may have been missed, too, and are about to be skipped.
        """
        is_told = False
        while True:
            with self._directory.locked():
                others = self._others_before(firing)
                if not others:
                    return self._directory.write_firing(replace(firing, state=FiringState.RUNNING))
            running = [one for one in others if one.state == FiringState.RUNNING]
            if running and overlap == "skip":
                return self._end(firing, FiringState.SKIPPED, f"{running[0].run or 'one'} runs")
            if len(others) > 1 and overlap != "wait" and not is_late:
                reason = f"another firing waits already, the one that was due at {others[-1].due}"
                return self._end(firing, FiringState.SKIPPED, reason)
            if running and overlap == "cancel_running":
                _cancel(running[0], f"the firing of {firing.due} takes its place")
            if not is_told:
                self._log(f"waiting for {', '.join(one.run or one.due for one in others)}")
                is_told = True
            if self._stop.wait(_POLL_SECONDS):
                return self._end(firing, FiringState.CANCELLED, "cancelled while it waited")

    def _others_before(self, firing: Firing) -> list[Firing]:
        """Return the firings that run, or wait and were due before."""
        others = [one for one in self._directory.firings() if one.id != firing.id]
        mine = (firing.due, firing.id)
        return [
            one
            for one in others
            if (one.state == FiringState.RUNNING and (one.is_held or _has_open_run(one)))
            or (one.state == FiringState.WAITING and one.is_held and (one.due, one.id) < mine)
        ]

    def _follow(self, firing: Firing) -> Firing:
        """Wait for the run's end, give new attempts as often as allowed, and note the end."""
        run = RunDirectory(Path(firing.run_path))
        while True:
            state = self._wait_for_end(run)
            if state != State.FAILED or firing.num_retries >= self._terms.retries:
                break
            number = firing.num_retries + 1
            firing = self._directory.write_firing(replace(firing, num_retries=number))
            self._log(f"run {run.id} failed; new attempts, {number} of {self._terms.retries}")
            self._continue("retry", run, "--failed")
        message = str(run.read_state().get("message") or "")
        return self._end(firing, _end_of(state), message)

    def _wait_for_end(self, run: RunDirectory) -> str:
        num_resumes, seen = 0, time.monotonic()
        while (state := run.read_state()["state"]) not in ENDED_RUN_STATES:
            if find_holder(run) is not None:
                seen = time.monotonic()
            elif time.monotonic() - seen > _SECONDS_WITHOUT_LAUNCHER:
                if num_resumes == _MOST_RESUMES:
                    raise CannotFire(f"run {run.id} lost its launcher {num_resumes + 1} times.")
                num_resumes += 1
                self._log(f"run {run.id} has lost its launcher and is resumed")
                self._continue("resume", run)
            time.sleep(_POLL_SECONDS)
            if self._stop.is_set() and not run.cancel_requested():
                run.request_cancel("cancelled on its Prefect page")
        return str(state)

    def _end(self, firing: Firing, state: FiringState, reason: str) -> Firing:
        self._log(f"{state}{f': {reason}' if reason else ''}")
        return self._directory.end_firing(firing, state, reason)

    def _continue(self, verb: str, run: RunDirectory, *options: str) -> None:
        """Have a process drive the run again.

        Raises:
            CannotFire: it cannot be.
        """
        workspace = ("--workspace", str(run.path.parents[1]))
        self._ask(verb, run.id, *options, "--detach", "--json", *workspace)

    def _ask(self, *words: str) -> dict[str, Any]:
        """Return what a command prints as JSON."""
        terms = self._terms
        own = {**terms.environment, "REDCO_FLOW_WORKSPACE": str(terms.workspace)}
        done = subprocess.run(
            [sys.executable, "-P", "-m", "redco_flow.cli.main", *words],
            cwd=terms.folder,
            env=_environment() | own,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            said = "\n".join(done.stderr.strip().splitlines()[-20:])
            raise CannotFire(f"`{shlex.join(['redco-flow', *words])}`: {said}")
        return dict(json.loads(done.stdout.splitlines()[-1]))


def new_firing(firing_id: str, due: datetime) -> Firing:
    """Return the record of a firing that begins."""
    text = due.astimezone(UTC).isoformat(timespec="seconds")
    return Firing(firing_id, text, FiringState.WAITING, began=utc_now())


def leave(directory: ScheduleDirectory, firing_id: str) -> None:
    """Cancel what a firing has begun that no thread has, because a user cancelled it."""
    firing = directory.find_firing(firing_id)
    if firing is not None and not firing.has_ended:
        _cancel(firing, "cancelled on its Prefect page")
        directory.end_firing(firing, FiringState.CANCELLED, "cancelled")


def note_end_of(directory: ScheduleDirectory, firing: Firing, retries: int = 0) -> Firing | None:
    """Note the end of a firing that no process has, where its run has ended.

    Args:
        retries: new attempts that the firing may be given.

    Returns:
        The firing with its end; None where it has none yet, or is to be continued.
    """
    if not firing.has_started_run or firing.state == FiringState.WAITING:
        return None
    state = RunDirectory(Path(firing.run_path)).read_state()["state"]
    is_to_be_retried = state == State.FAILED and firing.num_retries < retries
    if state not in ENDED_RUN_STATES or is_to_be_retried:
        return None
    return directory.end_firing(firing, _end_of(state), firing.reason)


def _end_of(state: str) -> FiringState:
    return _ENDS.get(State(state), FiringState.CANCELLED)


def _cancel(firing: Firing, reason: str) -> None:
    if _has_open_run(firing):
        RunDirectory(Path(firing.run_path)).request_cancel(reason)


def _has_open_run(firing: Firing) -> bool:
    if not firing.has_started_run:
        return False
    try:
        return RunDirectory(Path(firing.run_path)).read_state()["state"] not in ENDED_RUN_STATES
    except (RedcoFlowError, UsageError, OSError):
        return False  # its directory was deleted, or is damaged


def _environment() -> dict[str, str]:
    """Return this process's environment without the settings that Prefect was given in it."""
    named = ("PREFECT_API_URL", "PREFECT_API_KEY", "PREFECT_API_AUTH_STRING")
    kept = named if external_url() else ()
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("PREFECT_") or name in kept
    }


def _is_late(firing: Firing) -> bool:
    if (_time(firing.began) - _time(firing.due)).total_seconds() <= SECONDS_LATE:
        return False
    serving = Serving.find()
    return serving is None or _time(firing.due) < _time(serving.since)


def _time(text: str) -> datetime:
    found = datetime.fromisoformat(text)
    return found if found.tzinfo else found.replace(tzinfo=UTC)
