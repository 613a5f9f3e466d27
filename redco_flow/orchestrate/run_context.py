"""What the parts of one orchestrating process share: the run, its plan, its files, its stop."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from redco_flow.orchestrate.planning import Plan
from redco_flow.orchestrate.state_book import StateBook
from redco_flow.orchestrate.stopping import StopRequest
from redco_flow.spec.load import ResolvedPipeline
from redco_flow.spec.profile import Profile
from redco_flow.tracking.run_directory import RunDirectory
from redco_flow.tracking.workspace import Workspace

Say = Callable[[str], None]
"""Takes one line for people: a job's log line, or what the orchestrator does."""


@dataclass(frozen=True)
class RunContext:
    """One run as the process that holds its lease sees it.

    Args:
        slots: as many jobs at a time as the profile allows.
        environment: what jobs inherit: this process's as it was before Prefect's settings.
        code: commit and whether it is dirty, for the records.
        ahead: all stages' jobs are submitted at once, each behind those it takes from.
    """

    run: RunDirectory
    workspace: Workspace
    pipeline: ResolvedPipeline
    profile: Profile
    plan: Plan
    book: StateBook
    stop: StopRequest
    slots: threading.BoundedSemaphore
    environment: Mapping[str, str]
    code: dict[str, Any] = field(default_factory=dict)
    ahead: bool = False
