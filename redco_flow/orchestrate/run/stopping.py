"""State shared by the threads of the orchestrating process, and requests to stop it.

Two kinds: cancel ends the jobs too; detach leaves them running for a later `resume`. The first
request counts, except that a cancel outranks a detach that has not been acted on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from redco_flow.errors import RunCancelled
from redco_flow.orchestrate.run.plan import Plan
from redco_flow.orchestrate.run.state import StateStore
from redco_flow.spec.load import ResolvedPipeline
from redco_flow.spec.profile import Profile
from redco_flow.tracking.run_directory import RunDirectory
from redco_flow.tracking.workspace import Workspace

StopKind = Literal["cancel", "detach"]

_SECONDS_OF_SHORT_PAUSES = 60.0
_SHORT_PAUSE, _LONG_PAUSE = 0.25, 1.0


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
