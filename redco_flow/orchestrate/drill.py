"""A drill: one small training per fault, each harmed in its middle, held against one in peace.

Every training is a run like any other, in a workspace of its own below the profile's, so that
none reuses another's result. Knows what a run says of its end; the harm itself is the recipe
`drill`'s. Imports neither Prefect nor JAX.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from redco_flow.errors import UsageError
from redco_flow.launch.processes import FAULT_VARIABLE, FAULTS
from redco_flow.orchestrate.run.plan import make_plan
from redco_flow.orchestrate.run.start import retry_run, spawn, write_run
from redco_flow.spec.find import find_file
from redco_flow.spec.load import load_pipeline
from redco_flow.spec.profile import Profile, RetryBudgets
from redco_flow.tracking.attempt import State
from redco_flow.tracking.run_directory import RunDirectory
from redco_flow.tracking.workspace import Workspace

_PEACE = "peace"
_STALL_MINUTES = 1.0
# Without them a GPU adds up in any order, and no two trainings end with the same bits.
_REPEATING_FLAGS = "--xla_gpu_exclude_nondeterministic_ops=true --xla_gpu_autotune_level=0"
_MINUTES_TO_WARNING = 2
_TRAIN, _DIGESTS = "train", "digests"

Follow = Callable[[RunDirectory], int]


@dataclass(frozen=True)
class Survival:
    """The result of one drilled training.

    Args:
        fault: a name of FAULTS.
        survived: whether it ended with bitwise the parameters of the one in peace.
        how: what brought it to its end, or what went wrong.
        run: its id.
        seconds: from its start to its end.
    """

    fault: str
    survived: bool
    how: str
    run: str
    seconds: float


def drill(
    profile: Profile,
    profile_name: str,
    follow: Follow,
    *,
    faults: Sequence[str],
    num_hosts: int = 1,
    directory: Path,
) -> list[Survival]:
    """Run the training in peace and then once with each fault.

    Args:
        faults: names of the recipe's FAULTS.
        follow: shows a run until it ends, and returns its exit code.
        directory: where the workspaces are made; the nodes must reach it.

    Raises:
        UsageError: an unknown fault, more hosts than the profile can use, or the training fails
            in peace already; the message names the run.
    """
    if unknown := [fault for fault in faults if fault not in FAULTS]:
        raise UsageError(f"no such fault: {', '.join(unknown)}; known: {', '.join(FAULTS)}.")
    drills = _Drills(profile, profile_name, follow, num_hosts, directory)
    peaceful = drills.run(_PEACE)
    wanted = _digests(peaceful)
    if wanted is None:
        raise UsageError(
            f"the training fails without any fault; nothing else was tried. "
            f"redco-flow logs {peaceful.id} -w {peaceful.path.parent.parent}"
        )
    return [drills.survival(fault, wanted) for fault in faults]


@dataclass(frozen=True)
class _Drills:
    """Starts the trainings of one drill."""

    profile: Profile
    profile_name: str
    follow: Follow
    num_hosts: int
    directory: Path

    def survival(self, fault: str, wanted: str) -> Survival:
        """Run with a fault; where the run needs it, take it up by hand as its user would."""
        started_at = time.monotonic()
        run = self.run(fault)
        how = _how_it_went_on(run)
        state = run.read_state()["state"]
        if state in (State.FAILED, State.CANCELLED):
            why = _last_message(run)
            retry_run(run)
            self.follow(run)
            how = f"redco-flow retry, after: {why}"
        found = _digests(run)
        if found is None:
            how = _last_message(run)
        elif found != wanted:
            how = "it ended, but not with the parameters of the training in peace"
        seconds = time.monotonic() - started_at
        return Survival(fault, found == wanted, how, run.id, round(seconds, 1))

    def run(self, fault: str) -> RunDirectory:
        """Start the training and follow it to its end."""
        profile = self._profile_for(fault)
        overrides = [f"stages.{_TRAIN}.resources.num_hosts={self.num_hosts}"]
        if fault == "timeout":
            minutes = _MINUTES_TO_WARNING + self._minutes_after_warning()
            overrides.append(f"stages.{_TRAIN}.resources.walltime_minutes={minutes}")
        path = find_file("pipelines", "drill.yaml")
        resolved = load_pipeline(path, overrides, profile)
        workspace = Workspace.open(profile.workspace)
        run = write_run(
            resolved,
            profile,
            workspace,
            make_plan(resolved, workspace),
            profile_name=self.profile_name,
            overrides=overrides,
        )
        spawn(run)
        self.follow(run)
        return run

    def _minutes_after_warning(self) -> int:
        """Slurm warns before the time is over; elsewhere the job's warning ends it."""
        seconds: int = self.profile.section.seconds_of_warning
        return math.ceil(seconds / 60)

    def _profile_for(self, fault: str) -> Profile:
        """The profile with budgets that a single fault cannot use up, and the fault's name."""
        environment = dict(self.profile.environment)
        flags = (environment.get("XLA_FLAGS", ""), _REPEATING_FLAGS)
        environment["XLA_FLAGS"] = " ".join(flags).strip()
        if fault != _PEACE:
            environment[FAULT_VARIABLE] = fault
        # The others may compile for as long as the profile allows: the machine may be busy.
        usual_minutes = self.profile.stall_timeout_minutes
        stall_minutes = _STALL_MINUTES if fault == "stall" else usual_minutes
        return self.profile.model_copy(
            update={
                "environment": environment,
                "workspace": str(self.directory / fault),
                "stall_timeout_minutes": stall_minutes,
                "retries": RetryBudgets(failed=1, stalled=1, timeout=1),
            }
        )


def _digests(run: RunDirectory) -> str | None:
    """The id of the artifact with the digests: equal where all parameters are bitwise equal."""
    stage = run.read_state()["stages"][_DIGESTS]
    artifact: str | None = stage["artifacts"].get("metrics")
    return artifact if stage["state"] == State.COMPLETED else None


def _how_it_went_on(run: RunDirectory) -> str:
    attempts = run.attempts(_TRAIN)
    causes = [attempt.cause or "unknown" for attempt in attempts[:-1]]
    if causes:
        return f"a new attempt after: {', '.join(causes)}"
    last = attempts[-1].read_exit() if attempts else None
    restart = last.restart or 0 if last is not None else 0
    return f"the cluster restarted it ({restart} times)" if restart else "it was not disturbed"


def _last_message(run: RunDirectory) -> str:
    stages = run.read_state()["stages"].values()
    messages = [
        stage["message"] for stage in stages if stage["state"] in (State.FAILED, State.CANCELLED)
    ]
    return str(messages[0]).partition("\n")[0] if messages else str(run.read_state()["state"])
