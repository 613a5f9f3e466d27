"""The interface between a run and its flow: list the stages, run one, conclude.

One session per orchestrating process. `run_stages` executes the stages in threads, without
Prefect. A flow finds the session with `current_session`, because what Prefect is given as a
parameter is written into its database; its tasks follow the same stages.
"""

from __future__ import annotations

import threading
import traceback
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

from redco_flow.errors import RunCancelled, StageFailed
from redco_flow.orchestrate.run.ahead import JobChain, SweepQueue
from redco_flow.orchestrate.run.attempts import Finished, StageAttempts
from redco_flow.orchestrate.run.cancel import Detached, Log, RunContext
from redco_flow.orchestrate.run.plan import upstream_of
from redco_flow.orchestrate.run.stage_runner import StageRunner
from redco_flow.tracking.attempt import ENDED_STAGE_STATES, State

if TYPE_CHECKING:
    from redco_flow.launch.executor import CallJob

DETACHED_EXIT_CODE = 130
_KEPT_LINES = 200  # of a stage's log, for a flow that begins later
_ENDED = tuple(state for state in ENDED_STAGE_STATES if state is not State.COMPLETED)

_current: ContextVar[RunSession] = ContextVar("redco_flow_session")


@dataclass(frozen=True)
class StageNode:
    """One stage to bring to its end, and the stages of this session it waits for."""

    name: str
    upstream: tuple[str, ...]


@dataclass(frozen=True)
class Outcome:
    """The ending of a run, or that this process detached from it.

    Args:
        state: COMPLETED, FAILED, CANCELLED, STOPPED_EARLY; or DETACHED.
    """

    state: State
    exit_code: int
    message: str


class RunSession:
    """The stages of one run; its methods may be called from any thread."""

    def __init__(
        self,
        context: RunContext,
        *,
        leave_cancelled: bool = False,
        judges_ended: bool = False,
        keeps_ended: bool = False,
    ) -> None:
        """Start or resume a run: every stage that has not completed is to run.

        Args:
            context: the run.
            leave_cancelled: cancelled stages, those that were stopped early, and what needs
                them, stay as they are.
            judges_ended: a job that failed unobserved since the run was opened is tried again only
                as the profile allows; otherwise it gets another attempt.
            keeps_ended: stages that have ended in any way stay as they are.
        """
        self.context = context
        self.stages_ended = threading.Event()
        self.summary_is_published = False
        self._mutex = threading.Lock()
        self.flow_decides = False
        self._outcome: Outcome | None = None
        self._ended: dict[str, Finished | BaseException] = {}
        left = (State.CANCELLED, State.STOPPED_EARLY) if leave_cancelled else ()
        self.stages = tuple(_stages_to_run(context, _ENDED if keeps_ended else left))
        self._locks = {node.name: threading.Lock() for node in self.stages}
        self._logs = {node.name: _StageLog() for node in self.stages}
        kinds = {name: context.pipeline.stages[name].kind for name in context.plan.stages}
        begin = [node.name for node in self.stages]
        context.state_store.open_run(kinds, begin, judges_ended=judges_ended)
        self.upstream = {node.name: node.upstream for node in self.stages}
        self._attempts = StageAttempts(context, self.upstream, judges_ended=judges_ended)
        self._chain = JobChain(context, self._attempts, self.upstream) if context.ahead else None

    def submit_ahead(self, log: Log, queue: SweepQueue | None = None) -> None:
        """Submit the jobs of all stages of a run ahead; call it first.

        Args:
            log: takes lines on what was submitted, and what could not be.
            queue: of a run that is submitted with others of its sweep.
        """
        if self._chain is not None:
            self._chain.submit(log, queue)

    def note_packed(self, job: CallJob) -> None:
        """Write into the run's state that a job that runs stages of several runs is submitted."""
        if self._chain is not None:
            self._chain.note_packed(job)

    @property
    def is_cut(self) -> bool:
        """Whether the cluster did not take all jobs of a run ahead: a launcher has to follow it."""
        return self._chain is not None and self._chain.is_cut

    def run_stage(self, name: str, log: Log, *, with_job_lines: bool = True) -> Finished:
        """Bring one stage to its end, or wait until another thread has.

        Every stage it takes from must have ended.

        Args:
            log: takes the launcher's lines about the stage.
            with_job_lines: whether it also takes what the stage's job prints.

        Raises:
            StageFailed: its job ended without a result; names job, log and last lines.
            RunCancelled: it was cancelled before or while it ran.
            Detached: this process is to end; the stage's job runs on.
        """
        self._logs[name].send_to(log, with_job_lines=with_job_lines)
        with self._locks[name]:
            if name not in self._ended:
                self._ended[name] = self._try_stage(name, self._logs[name])
        ended = self._ended[name]
        if isinstance(ended, Finished):
            return ended
        raise ended

    def _try_stage(self, name: str, log: _StageLog) -> Finished | BaseException:
        stage = self.context.pipeline.stages[name]
        try:
            finished = StageRunner(
                self.context, stage, self._attempts, log.add, log.add_job_line, self._chain
            ).run()
        except (StageFailed, RunCancelled) as error:
            if self._chain is not None:
                verb = "was stopped" if isinstance(error, RunCancelled) else "failed"
                self._chain.end_downstream(name, f"upstream {name} {verb}")
            return error
        except (Exception, Detached) as error:  # noqa: BLE001 (all threads that follow raise it)
            return error
        self._attempts.made[name] = finished.result.outputs
        return finished

    def run_stages(self, log: Log, *, with_job_lines: bool = False) -> None:
        """Bring every stage that has not ended to its end, each in a thread."""
        futures: dict[str, Future[bool]] = {}

        def bring_to_end(node: StageNode) -> bool:
            upstream = [futures[name].result() for name in node.upstream]  # waits for each
            if not all(upstream):
                return False
            try:
                self.run_stage(
                    node.name,
                    lambda line: log(f"{node.name} | {line}"),
                    with_job_lines=with_job_lines,
                )
            except (StageFailed, RunCancelled, Detached) as error:
                log(f"{node.name} | {error}")
                return False
            except Exception:  # noqa: BLE001 (a record that cannot be written; the others go on)
                log(f"{node.name} | {traceback.format_exc()}")
                return False
            return True

        with ThreadPoolExecutor(max_workers=max(1, len(self.stages))) as pool:
            for node in self.stages:
                futures[node.name] = pool.submit(bring_to_end, node)

    @property
    def has_begun(self) -> bool:
        """Whether a stage has begun."""
        return bool(self._ended) or any(lock.locked() for lock in self._locks.values())

    @property
    def runnable(self) -> list[str]:
        """Stages that could begin now: not ended, and all they take from is there."""
        states = {name: stage["state"] for name, stage in self.context.state_store.stages().items()}
        return [
            node.name
            for node in self.stages
            if states[node.name] not in ENDED_STAGE_STATES
            and all(states[name] == State.COMPLETED for name in node.upstream)
        ]

    def outcome(self) -> Outcome:
        """Return how the run ended, for its flow; waits until the stages have.

        A flow that decides says so by this call: stages that it did not start are skipped.
        """
        if self.flow_decides:
            return self.conclude()
        self.stages_ended.wait()
        assert self._outcome is not None
        return self._outcome

    def conclude(self) -> Outcome:
        """Decide how the run ended; stages that could not run are marked as skipped.

        Call it when every stage has been tried. A flow that only follows gets this outcome, and
        never judges by itself: the run may belong to another process by then.
        """
        with self._mutex:  # a flow that decides and the main thread may both ask
            self._outcome = self._judge()
        self.stages_ended.set()
        return self._outcome

    def _judge(self) -> Outcome:
        if self.context.stop.kind == "detach" and not self._all_ended():
            return Outcome(State.DETACHED, DETACHED_EXIT_CODE, self.context.stop.reason)
        why = self.context.stop.reason or "the run has ended without it"
        if self._chain is not None:
            self._chain.end_all(why)
        else:
            self._attempts.end_open(why)
        self._close_stages()
        states = self.context.state_store.stages()
        failed = [name for name, stage in states.items() if stage["state"] == State.FAILED]
        cancelled = [name for name, stage in states.items() if stage["state"] == State.CANCELLED]
        if failed:
            first_lines = [str(states[name]["message"]).partition("\n")[0] for name in failed]
            return Outcome(State.FAILED, StageFailed.exit_code, "; ".join(first_lines))
        if cancelled:
            why = self.context.stop.reason or f"{', '.join(cancelled)} was cancelled"
            return Outcome(State.CANCELLED, RunCancelled.exit_code, why)
        stopped = [one for one in states.values() if one["state"] == State.STOPPED_EARLY]
        if stopped:
            return Outcome(State.STOPPED_EARLY, 0, str(stopped[0]["message"]))
        unfinished = [n.name for n in self.stages if states[n.name]["state"] != State.COMPLETED]
        if unfinished:  # the flow that was to run them failed itself; orchestrator.log says how
            why = f"{', '.join(unfinished)} not started: {self.context.run.log_path} says why"
            return Outcome(State.FAILED, StageFailed.exit_code, why)
        return Outcome(State.COMPLETED, 0, _tally(states))

    def _all_ended(self) -> bool:
        states = self.context.state_store.stages().values()
        return all(stage["state"] in ENDED_STAGE_STATES for stage in states)

    def _close_stages(self) -> None:
        """Give every stage that never began its end: cancelled with the run, or skipped."""
        state_store, stop = self.context.state_store, self.context.stop
        for name, stage in state_store.stages().items():
            if stage["state"] in ENDED_STAGE_STATES:
                continue
            if stop.kind == "cancel":
                state_store.set_stage(name, State.CANCELLED, message=f"cancelled: {stop.reason}")
                continue
            states = state_store.stages()
            upstream = upstream_of(self.context.pipeline.stages[name])
            blame = [one for one in upstream if states[one]["state"] != State.COMPLETED]
            why = ", ".join(f"{one} {states[one]['state']}" for one in blame)
            state_store.set_stage(
                name, State.SKIPPED, message=f"upstream {why}" if why else "not started"
            )


class _StageLog:
    """Log lines of a stage, for every thread that follows it."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._lines: deque[tuple[str, bool]] = deque(maxlen=_KEPT_LINES)
        self._logs: list[tuple[Log, bool]] = []

    def send_to(self, log: Log, *, with_job_lines: bool) -> None:
        """Send the last lines so far, and all further ones."""
        with self._mutex:
            for line, is_of_job in self._lines:
                if with_job_lines or not is_of_job:
                    log(line)
            self._logs.append((log, with_job_lines))

    def add(self, line: str) -> None:
        """Take a line of the launcher."""
        self._add(line, is_of_job=False)

    def add_job_line(self, line: str) -> None:
        """Take a line of the stage's job."""
        self._add(line, is_of_job=True)

    def _add(self, line: str, *, is_of_job: bool) -> None:
        with self._mutex:
            self._lines.append((line, is_of_job))
            for log, with_job_lines in self._logs:
                if with_job_lines or not is_of_job:
                    log(line)


def current_session() -> RunSession:
    """Return the session of the run that this process orchestrates.

    Raises:
        LookupError: the flow was started by hand; `redco-flow run` starts it.
    """
    try:
        return _current.get()
    except LookupError:
        raise LookupError(
            "this flow runs inside `redco-flow run FILE`, which opens the run it works on."
        ) from None


@contextmanager
def session_in_use(session: RunSession) -> Iterator[None]:
    """Make `session` the one that `current_session` returns in this thread."""
    token = _current.set(session)
    try:
        yield
    finally:
        _current.reset(token)


def _stages_to_run(context: RunContext, left: Collection[State]) -> Iterator[StageNode]:
    """The stages of the plan's window, without those in a state of `left` and what needs them."""
    known = context.state_store.stages()
    left_out: set[str] = set()
    for name, stage in context.pipeline.stages.items():
        upstream = upstream_of(stage)
        if (
            context.plan.stages[name].action == "skip"
            or known.get(name, {}).get("state") in left
            or left_out.intersection(upstream)
        ):
            left_out.add(name)
        else:
            yield StageNode(name, upstream)


def _tally(states: Mapping[str, Mapping[str, object]]) -> str:
    completed = [stage for stage in states.values() if stage["state"] == State.COMPLETED]
    reused = sum(bool(stage["reused"]) for stage in completed)
    text = f"{len(completed)} stages completed" if len(completed) != 1 else "1 stage completed"
    return f"{text}, {reused} of them reused" if reused else text
