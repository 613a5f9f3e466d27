"""Tell the Prefect UI how a stage is while it runs: why it waits, where it goes on, how far it is.

One thread for each stage that a task follows. It reads the run's own files, and what Prefect does
not take is told again later: neither a dead server nor a slow one is felt by the run.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import UUID

from redco_flow.orchestrate.prefect.artifacts import (
    FlowRunArtifacts,
    impatient_client,
    read_live_artifact,
)
from redco_flow.orchestrate.run.session import RunSession
from redco_flow.orchestrate.run.state import StateStore
from redco_flow.records import read_json_if_present
from redco_flow.tracking.attempt import AttemptDirectory, Cause, State
from redco_flow.tracking.goodput import START
from redco_flow.tracking.run_directory import RunDirectory
from redco_flow.tracking.typed_records import unless_damaged

if TYPE_CHECKING:
    from prefect.client.schemas.objects import TaskRun

_SECONDS_BETWEEN_LOOKS = 1.0
_SECONDS_TO_ANSWER = 5.0
# A page is looked at often in the first minute and seldom in the tenth hour.
_FIRST_PROGRESS, _LAST_PROGRESS = 2.0, 30.0
_SHARE_OF_TIME = 0.05
_QUEUED = re.compile(r"job \S+ waits in the queue: (?P<why>.*)", re.DOTALL)


@dataclass(frozen=True)
class StageWords:
    """How a stage is, for people.

    Args:
        state: Pending, Running or Retrying: names that the UI knows and filters by.
        words: such as "queued on Slurm: Priority"; empty where the state says all.
    """

    state: str
    words: str = ""


def words_of(run: RunDirectory, stage: str, entry: Mapping[str, Any]) -> StageWords:
    """Return how a stage is that has not ended.

    Args:
        entry: its entry in state.json.
    """
    said = str(entry.get("message") or "").partition("\n")[0]
    number = entry.get("attempt")
    if entry.get("state") != State.RUNNING or number is None:
        return StageWords("Pending", said)
    attempt = run.attempt(stage, number)
    progress = unless_damaged(attempt.read_progress) or {}
    # The cluster is asked seldom: a heartbeat since then knows better than its answer.
    if said and progress.get("time", "") <= entry.get("told_at", ""):
        return StageWords("Pending", _queue_words(said, attempt))
    if (why := _why_again(run, attempt)) is not None and progress:
        return StageWords("Retrying", f"{why}, {_where_it_goes_on(attempt)}")
    return StageWords("Running")


def _queue_words(said: str, attempt: AttemptDirectory) -> str:
    """Why a job waits, in the cluster's own words."""
    found = _QUEUED.fullmatch(said)
    if found is None:
        return said
    job = unless_damaged(attempt.read_job) or {}
    return f"queued on {str(job.get('executor', 'the cluster')).capitalize()}: {found['why']}"


def _why_again(run: RunDirectory, attempt: AttemptDirectory) -> str | None:
    """Why this is not the stage's first start; None where it is."""
    # Of the start before, if the cluster has started the same job again.
    ending = unless_damaged(lambda: read_json_if_present(attempt.rank_exit_path(0))) or {}
    cause = str(ending.get("cause") or "")
    if not cause and attempt.number > 1:
        before = unless_damaged(lambda: run.attempt(attempt.stage, attempt.number - 1).cause)
        cause = before or Cause.LOST
    if not cause or cause == Cause.COMPLETED:
        return None
    return "taken back by the cluster" if cause == Cause.TERMINATED else cause.replace("_", " ")


def _where_it_goes_on(attempt: AttemptDirectory) -> str:
    starts = [one for one in attempt.read_metrics() if one.get("kind") == START]
    step = starts[-1].get("start_step") if starts else 0
    return f"goes on at step {step}" if step else "begins again"


@contextlib.contextmanager
def told_live(session: RunSession, stage: str) -> Iterator[None]:
    """Have the present task's page tell how its stage is until the block is left."""
    from prefect.context import TaskRunContext

    context = TaskRunContext.get()
    if context is None or context.task_run.flow_run_id is None:
        yield  # called as a function, by a test or a script
        return
    store, run = session.context.state_store, session.context.run
    states = _States(stage, context.task_run)
    watch = _Watch(run, stage, store, states, context.task_run.flow_run_id)
    threading.Thread(target=watch.run, name=f"page of {stage}", daemon=True).start()
    try:
        yield
    finally:
        watch.done.set()
        states.close(store.stage(stage))


class _States:
    """The state and the name of one task run, as long as the task has not come to its end.

    They go the way of the task's own states, as events of this process: whatever a server is told
    last is then the task's end. Nothing here waits for a server.
    """

    def __init__(self, stage: str, task_run: TaskRun) -> None:
        self._stage = stage
        self._task_run = task_run
        self._told = StageWords("Running")
        self._mutex = threading.Lock()
        self._is_closed = False

    def tell(self, now: StageWords) -> None:
        """Show how the stage is, if that is news."""
        with self._mutex:
            if now != self._told and not self._is_closed:
                self._emit(now)
                self._told = now

    def close(self, entry: Mapping[str, Any]) -> None:
        """Leave the task run to its task; what was reused keeps the name of its maker."""
        with self._mutex:
            self._is_closed = True
        maker = (entry.get("made_by") or {}).get("run")
        if entry.get("reused") and maker:
            self._task_run.name = f"{self._stage}: reused from {maker}"

    def _emit(self, now: StageWords) -> None:
        from prefect.client.schemas.objects import State as PrefectState
        from prefect.client.schemas.objects import StateType
        from prefect.utilities.engine import emit_task_run_state_change_event

        kind = StateType.PENDING if now.state == "Pending" else StateType.RUNNING
        state: PrefectState[Any] = PrefectState(type=kind, name=now.state, message=now.words)
        name = f"{self._stage}: {now.words}" if now.words else self._stage
        shown = self._task_run.model_copy(update={"name": name, "state": state})
        emit_task_run_state_change_event(shown, self._task_run.state, state)


class _Watch:
    """Looks at one stage until it is done."""

    def __init__(
        self,
        run: RunDirectory,
        stage: str,
        store: StateStore,
        states: _States,
        flow_run_id: UUID,
    ) -> None:
        self.done = threading.Event()
        self._run = run
        self._stage = stage
        self._store = store
        self._states = states
        self._artifacts = FlowRunArtifacts(flow_run_id)
        self._sent: Any = None

    def run(self) -> None:
        """Look, tell, sleep."""
        began = time.monotonic()
        progress_at = 0.0
        while not self.done.wait(_SECONDS_BETWEEN_LOOKS):
            # Whatever fails here (Prefect, a torn record), the next look tries again.
            with contextlib.suppress(Exception):
                self._states.tell(words_of(self._run, self._stage, self._entry()))
            elapsed = time.monotonic() - began
            if elapsed >= progress_at:
                interval = max(_FIRST_PROGRESS, _SHARE_OF_TIME * elapsed)
                progress_at = elapsed + min(_LAST_PROGRESS, interval)
                with contextlib.suppress(Exception):
                    self._send()

    def _entry(self) -> Mapping[str, Any]:
        return self._store.stage(self._stage)

    def _send(self) -> None:
        if self._entry().get("state") != State.RUNNING:
            return
        progress = read_live_artifact(self._run, self._stage)
        if progress is None or progress == self._sent or self.done.is_set():
            return
        with impatient_client(_SECONDS_TO_ANSWER) as client:
            self._artifacts.put([progress], client)
        self._sent = progress
