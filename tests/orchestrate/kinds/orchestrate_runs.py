"""Start real pipelines of tiny stages, wait for what must come, and count what happened."""

import os
import signal
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from redco_flow.launch.processes import kill_processes_of
from redco_flow.orchestrate.run.cancel import StopRequest
from redco_flow.orchestrate.run.driver import open_session
from redco_flow.orchestrate.run.plan import make_plan
from redco_flow.orchestrate.run.start import spawn, write_run
from redco_flow.orchestrate.run.state import StateStore
from redco_flow.spec.load import load_pipeline
from redco_flow.spec.profile import profile_model
from redco_flow.tracking.journal import read_journal
from redco_flow.tracking.locks import find_holder
from redco_flow.tracking.workspace import Workspace

TWO_STAGES = """
name: two-stages
stages:
  preprocess: {kind: orchestrate_kinds.numbers}
  train: {kind: orchestrate_kinds.total}
"""
TUNED = """\
name: tuned
model: {{name_or_path: {0}}}
stages:
  train: {{kind: orchestrate_kinds.tuned, rows: {0}/../rows.jsonl}}
"""
DIAMOND = """
name: diamond
stages:
  preprocess: {kind: orchestrate_kinds.numbers, count: 4}
  train-small: {kind: orchestrate_kinds.total, learning_rate: 1e-4}
  train-large: {kind: orchestrate_kinds.total, learning_rate: 2e-4}
  compare: {kind: orchestrate_kinds.score, metrics: [train-small, train-large]}
"""
OPTIONS = {"leave_cancelled": False}
ENDED = ("completed", "failed", "cancelled")
SECONDS_WITHOUT_HOLDER = 10.0


def until(condition, seconds=400.0):
    """Wait for something that must come; return what it was."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited {seconds} s in vain"
        time.sleep(0.05)
    return found


@pytest.fixture
def executions(tmp_path):
    """A file that gets a line for each execution of a stage."""
    return tmp_path / "executions"


@pytest.fixture
def gate(tmp_path):
    """A file for which a stage waits."""
    return tmp_path / "gate"


@pytest.fixture
def held(executions, gate):
    """Overrides: executions are counted, and the train stage waits for the gate."""
    files = [f"{stage}.executions={executions}" for stage in ("preprocess", "train")]
    return [*files, f"train.gate={gate}"]


@dataclass
class Runs:
    """Start pipelines in one workspace and look at what becomes of them."""

    folder: Path
    profile: dict = field(default_factory=dict)
    started: list = field(default_factory=list)

    @property
    def workspace(self):
        return Workspace.open(self.folder / "workspace")

    def load(self, text, overrides=(), profile=None):
        path = self.folder / "pipeline.yaml"
        path.write_text(text)
        return load_pipeline(path, overrides, profile)

    def plan(self, text, overrides=(), **options):
        return make_plan(self.load(text, overrides), self.workspace, **options)

    def write(self, text, overrides=(), *, ahead=False, **options):
        """Make a run's directory; nothing is started."""
        settings = {"grace_seconds": 2.0} | self.profile
        profile = profile_model()(workspace=str(self.folder / "workspace"), **settings)
        resolved = self.load(text, overrides, profile)
        plan = make_plan(resolved, self.workspace, **options)
        run = write_run(
            resolved,
            profile,
            self.workspace,
            plan,
            overrides=overrides,
            argv=["redco-flow"],
            ahead=ahead,
        )
        self.started.append(run)
        return run

    def start(self, text, overrides=(), **options):
        """Start a run in a process of its own."""
        run = self.write(text, overrides, **options)
        spawn(run)
        return run

    def complete(self, text, overrides=(), **options):
        run = self.start(text, overrides, **options)
        state = wait_for_end(run)
        assert state["state"] == "completed", run.log_path.read_text()
        return run, state

    def clean_up(self):
        for run in self.started:
            kill_launcher(run)
            for stage in run.read_state()["stages"]:
                for attempt in run.attempts(stage):
                    kill_processes_of(attempt.path)


class InProcess:
    """One run driven by a thread of the test itself, without Prefect."""

    def __init__(self, run, **options):
        self.run = run
        self.stop = StopRequest()
        self.said = []
        self.session = open_session(run, StateStore(run), self.stop, **OPTIONS | options)
        self._thread = threading.Thread(target=self._drive)
        self._thread.start()

    def _drive(self):
        self.session.submit_ahead(self.said.append)
        self.session.run_stages(self.said.append, with_job_lines=True)

    def end(self, seconds=400):
        """Wait for the stages' end; write and return the run's outcome."""
        self._thread.join(seconds)
        assert not self._thread.is_alive()
        outcome = self.session.conclude()
        if outcome.state != "detached":
            state_store = self.session.context.state_store
            state_store.close_run(outcome.state, outcome.exit_code, outcome.message)
        return outcome

    def states(self):
        return {name: stage["state"] for name, stage in self.run.read_state()["stages"].items()}


def wait_for_end(run, seconds=400.0):
    """Wait until the run has ended; return its state."""
    driven_at = time.monotonic()

    def ended():
        nonlocal driven_at
        state = run.read_state()
        if state["state"] in ENDED:
            return state
        if find_holder(run) is not None:
            driven_at = time.monotonic()
        # Between its reopening and its start a run that is continued has no holder either.
        assert time.monotonic() < driven_at + SECONDS_WITHOUT_HOLDER, run.log_path.read_text()
        return None

    return until(ended, seconds)


def wait_for_stage(run, stage, state="running", seconds=400.0):
    """Wait until a stage is in a state; return its entry."""

    def reached():
        entry = run.read_state()["stages"].get(stage, {})
        return entry if entry.get("state") == state else None

    return until(reached, seconds)


def kill_launcher(run):
    """kill -9 of the process that drives the run, if it lives and is in no job of a cluster."""
    lease = find_holder(run)
    if lease is not None and not lease.job:
        with suppress(ProcessLookupError):
            os.kill(lease.holder.pid, signal.SIGKILL)
        until(lambda: find_holder(run) is None)


def events(run):
    """The run's journal as event names."""
    return [record["event"] for record in read_journal(run.journal_path)]


def count_lines(path):
    """How often a stage was executed."""
    return len(path.read_text().splitlines()) if path.exists() else 0
