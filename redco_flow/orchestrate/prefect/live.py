"""Show in a task's name and state in the Prefect UI why its stage waits, or from where it resumes.

One thread for each stage that a task follows reads the run's own files. States are events of this
process, which Prefect sends when it can: a dead or slow server does not delay the run.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterator, Mapping
from contextvars import copy_context
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from redco_flow.orchestrate.run.session import RunSession
from redco_flow.records import read_json_if_present
from redco_flow.tracking.attempt import AttemptDirectory, Cause, State
from redco_flow.tracking.goodput import START
from redco_flow.tracking.run_directory import RunDirectory
from redco_flow.tracking.typed_records import unless_damaged

if TYPE_CHECKING:
    from prefect.client.schemas.objects import TaskRun

_SECONDS_BETWEEN_LOOKS = 1.0
_QUEUED = re.compile(r"job \S+ waits in the queue: (?P<why>.*)", re.DOTALL)


@dataclass(frozen=True)
class StageWords:
    """A stage's state as the UI shows it.

    Args:
        state: Pending, Running or Retrying: names that the UI knows and filters by.
        words: such as "queued on Slurm: Priority"; empty where the state is enough.
    """

    state: str
    words: str = ""


def words_of(run: RunDirectory, stage: str, entry: Mapping[str, Any]) -> StageWords:
    """Return the state of a stage that has not ended.

    Args:
        entry: its entry in state.json.
    """
    said = str(entry.get("message") or "").partition("\n")[0]
    number = entry.get("attempt")
    if entry.get("state") != State.RUNNING or number is None:
        return StageWords("Pending", said)
    attempt = run.attempt(stage, number)
    progress = unless_damaged(attempt.read_progress) or {}
    # The cluster is polled seldom: a later heartbeat is newer than its answer.
    if said and progress.get("time", "") <= entry.get("told_at", ""):
        return StageWords("Pending", _queue_words(said, attempt))
    if (cause := _restart_cause(run, attempt)) is not None and progress:
        return StageWords("Retrying", f"{cause}, {_start_words(attempt)}")
    return StageWords("Running")


def _queue_words(said: str, attempt: AttemptDirectory) -> str:
    """The cluster's own reason why a job waits."""
    found = _QUEUED.fullmatch(said)
    if found is None:
        return said
    job = unless_damaged(attempt.read_job) or {}
    return f"queued on {str(job.get('executor', 'the cluster')).capitalize()}: {found['why']}"


def _restart_cause(run: RunDirectory, attempt: AttemptDirectory) -> str | None:
    """The cause that ended the start before; None of the stage's first start."""
    # If the cluster has started the same job again, the attempt has the ending itself.
    ending = unless_damaged(lambda: read_json_if_present(attempt.rank_exit_path(0))) or {}
    cause = str(ending.get("cause") or "")
    if not cause and attempt.number > 1:
        before = unless_damaged(lambda: run.attempt(attempt.stage, attempt.number - 1).cause)
        cause = before or Cause.LOST
    if not cause or cause == Cause.COMPLETED:
        return None
    return "stopped by the cluster" if cause == Cause.TERMINATED else cause.replace("_", " ")


def _start_words(attempt: AttemptDirectory) -> str:
    starts = [one for one in attempt.read_metrics() if one.get("kind") == START]
    step = starts[-1].get("start_step") if starts else 0
    return f"resumes at step {step}" if step else "starts again"


@contextlib.contextmanager
def reporting_live(session: RunSession, stage: str) -> Iterator[None]:
    """Show the stage's state on the present task's page until the block is left."""
    from prefect.context import TaskRunContext

    context = TaskRunContext.get()
    if context is None or context.task_run.flow_run_id is None:
        yield  # called as a function, by a test or a script
        return
    store, run = session.context.state_store, session.context.run
    page, done = _TaskPage(stage, context.task_run), threading.Event()

    def watch() -> None:
        while not done.wait(_SECONDS_BETWEEN_LOOKS):
            with contextlib.suppress(Exception):  # Prefect, a torn record: the next look retries
                page.show(words_of(run, stage, store.stage(stage)))

    # By the context an event finds its flow run: a process may have several.
    in_context = copy_context().run
    threading.Thread(target=in_context, args=(watch,), name=f"page of {stage}", daemon=True).start()
    try:
        yield
    finally:
        done.set()
        page.close(store.stage(stage))


class _TaskPage:
    """The state and the name of one task run until its task ends.

    They are sent as the task's own states are, as events of this process, so the task's end is the
    last that a server receives. Nothing here waits for a server.
    """

    def __init__(self, stage: str, task_run: TaskRun) -> None:
        self._stage = stage
        self._task_run = task_run
        self._shown = StageWords("Running")
        self._mutex = threading.Lock()
        self._is_closed = False

    def show(self, now: StageWords) -> None:
        """Show the stage's state, if it has changed."""
        with self._mutex:
            if now != self._shown and not self._is_closed:
                self._emit(now)
                self._shown = now

    def close(self, entry: Mapping[str, Any]) -> None:
        """Leave the task run to its task; a reused stage's keeps the name of the run that made it.

        Args:
            entry: the stage's in state.json.
        """
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
