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

from redco_flow.orchestrate.prefect.artifacts import FlowRunArtifacts, read_live_artifacts
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
_FIRST_CURVE, _LAST_CURVE = 5.0, 300.0
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


def _next_after(elapsed: float, first: float, last: float) -> float:
    """When to send something again: often at first, then seldom."""
    return elapsed + min(last, max(first, _SHARE_OF_TIME * elapsed))


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
        self._sent: dict[str, Any] = {}

    def run(self) -> None:
        """Look, tell, sleep."""
        began = time.monotonic()
        progress_at, curve_at = 0.0, _FIRST_CURVE
        while not self.done.wait(_SECONDS_BETWEEN_LOOKS):
            # Prefect, a torn record, a file that is being replaced: whatever it is, the next look
            # tells more.
            with contextlib.suppress(Exception):
                self._states.tell(words_of(self._run, self._stage, self._entry()))
            elapsed = time.monotonic() - began
            if elapsed < progress_at:
                continue
            with_curve = elapsed >= curve_at
            progress_at = _next_after(elapsed, _FIRST_PROGRESS, _LAST_PROGRESS)
            if with_curve:
                curve_at = _next_after(elapsed, _FIRST_CURVE, _LAST_CURVE)
            with contextlib.suppress(Exception):
                self._send(with_curve=with_curve)

    def _entry(self) -> Mapping[str, Any]:
        return self._store.stage(self._stage)

    def _send(self, *, with_curve: bool) -> None:
        from prefect.client.orchestration import get_client
        from prefect.settings import (
            PREFECT_API_REQUEST_TIMEOUT,
            PREFECT_CLIENT_MAX_RETRIES,
            temporary_settings,
        )

        if self._entry().get("state") != State.RUNNING:
            return
        found = read_live_artifacts(self._run, self._stage, with_curve=with_curve)
        news = [one for one in found if self._sent.get(one.key) != one]
        if not news or self.done.is_set():
            return
        patience = {PREFECT_API_REQUEST_TIMEOUT: _SECONDS_TO_ANSWER, PREFECT_CLIENT_MAX_RETRIES: 0}
        with temporary_settings(patience), get_client(sync_client=True) as client:
            self._artifacts.put(news, client)
        self._sent |= {one.key: one for one in news}
