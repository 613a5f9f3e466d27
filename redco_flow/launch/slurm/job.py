"""One Slurm job: its state from its own files first and Slurm's word second, and how to end it.

A job is found again from job.json alone: by its id or, if the launcher died before it learnt the
id, by its unique name. Asks Slurm through the queue that all jobs of a process share.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from redco_flow.errors import ClusterUnreachable, StageFailed
from redco_flow.launch.call import read_call
from redco_flow.launch.endings import (
    ClusterWord,
    RankEnding,
    judge,
    last_restart,
    never_began,
    read_endings,
    write_exit,
)
from redco_flow.launch.job import (
    CallJob,
    JobStatus,
    read_log_end,
    status_from_files,
)
from redco_flow.launch.redaction import redact_text
from redco_flow.launch.slurm import queue
from redco_flow.launch.slurm.queue import JobEntry, QueueView, SlurmQueue, shared_queue
from redco_flow.launch.slurm.script import JOB_ID_FILE, JOB_LOG, REQUEUE_FILE
from redco_flow.records import SECONDS_TO_SEE_RECORDS, list_directory, write_json
from redco_flow.spec.secrets import secret_values
from redco_flow.tracking.attempt import Cause, ExitRecord, State
from redco_flow.tracking.process_identity import utc_now

_CAUSES = {
    "COMPLETED": Cause.FAILED,  # without a result, that is
    "FAILED": Cause.FAILED,
    "CANCELLED": Cause.CANCELLED,
    "REVOKED": Cause.CANCELLED,
    "TIMEOUT": Cause.TIMEOUT,
    "DEADLINE": Cause.TIMEOUT,
    "NODE_FAIL": Cause.NODE_FAILURE,
    "BOOT_FAIL": Cause.NODE_FAILURE,
    "PREEMPTED": Cause.PREEMPTED,
    "OUT_OF_MEMORY": Cause.OUT_OF_MEMORY,
}
_WAITING = {
    "PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT",
    "RESV_DEL_HOLD",
}  # fmt: skip
_ENDING_WORDS = {
    Cause.TIMEOUT: "its time was over (resources.walltime_minutes)",
    Cause.NODE_FAILURE: "a node failed and the job was not queued again",
    Cause.PREEMPTED: "its nodes were given to another job and it was not queued again",
    Cause.OUT_OF_MEMORY: "it used more memory than it had asked for (resources.memory_gib)",
    Cause.CANCELLED: "it was cancelled by scancel",
}
_FAILED_START = re.compile(r"launch.failed.requeued.held", re.IGNORECASE)
_MAX_FAILED_STARTS = 3


def is_terminal(entry: JobEntry) -> bool:
    """Say whether this state may be a job's last; a requeue can still follow."""
    return entry.state in _CAUSES


def is_held(entry: JobEntry) -> bool:
    """Say whether a node refused the job's start, for which Slurm holds it in the queue."""
    return _FAILED_START.search(entry.reason) is not None


def deserves_release(entry: JobEntry) -> bool:
    """Say whether a held job should be tried on another node; after some of them it is the job."""
    return is_held(entry) and (entry.restarts or 0) <= _MAX_FAILED_STARTS


def live_status(entry: JobEntry, problem: str) -> JobStatus:
    """Return the status of a job that has not ended.

    Args:
        problem: why Slurm's answer is old; "" where it is not.
    """
    restarts = f", restarted {entry.restarts} times" if entry.restarts else ""
    stale = f" (last known; {problem})" if problem else ""
    source = f"squeue{' of before' if problem else ''}: {entry.state}"
    if entry.state in _WAITING:
        reason = entry.reason or entry.state.lower()
        mend = f"; `scontrol release {entry.job_id}` lets it start again" if is_held(entry) else ""
        text = f"waits in the queue: {reason}{restarts}{mend}{stale}"
        return JobStatus(State.PENDING, message=text, source=source, news=text)
    word = "runs" if entry.state in ("RUNNING", "COMPLETING") else entry.state.lower()
    text = f"{word} on {entry.hosts or 'unnamed nodes'}{restarts}{stale}"
    return JobStatus(State.RUNNING, message=text, source=source, news=text)


def word_of(entry: JobEntry, log_end: str) -> ClusterWord:
    """Return what Slurm says of a job's end.

    Args:
        log_end: the end of the job's own log, for what went wrong before its ranks began.
    """
    cause = _CAUSES[entry.state]
    if cause is not Cause.FAILED:
        return ClusterWord(decided=(cause, f"Slurm says {entry.state}: {_ENDING_WORDS[cause]}."))
    text = f"Slurm says {entry.state} and no rank said why; logs/slurm.log ends: {log_end}"
    return ClusterWord(stopped=(cause, text), unstarted=(cause, text))


_UNKNOWN = "unknown"
_SECONDS_TO_CONFIRM = 12.0  # a job that is being queued again passes for FAILED meanwhile
_SECONDS_TO_CONFIRM_CANCELLED = 3.0
_SECONDS_TO_QUEUE_AGAIN = 60.0
_SECONDS_TO_APPEAR = 5.0
_SECONDS_OF_URGENCY = 15.0
_LOG_END_BYTES = 1000


class SlurmJob(CallJob):
    """A job of a Slurm cluster."""

    def __init__(
        self,
        folder: Path | str,
        job_id: str,
        tasks: Sequence[int] = (0,),
        record: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(folder, job_id or _UNKNOWN, tasks, record)
        self._cluster = str(self._record.get("cluster") or "")
        self._followed_since = self._queue.clock()
        self._urgent_until = float("-inf")
        self._rank_zero_ended_at: float | None = None
        self._vanishing: tuple[str, float] | None = None
        self._was_pending = False
        self._released_restart: int | None = None

    def status(self) -> JobStatus:
        """Say what exit.json says, else what Slurm says; asks Slurm at most every ten seconds.

        What Slurm calls an end counts once a second answer confirms it: a requeue may follow. A job
        that Slurm holds because a node could not start it is let go, to start on another.
        """
        if self._vanishing is not None:
            list_directory(self.attempt.path)  # it may have ended, and NFS not show exit.json yet
        if status := status_from_files(self.attempt):
            return status
        view = self._look()
        if not self._knows_id() and (status := self._search(view)) is not None:
            return status
        entry = view.entries.get(self.job_id)
        if entry is not None and not is_terminal(entry):
            self._vanishing = None
            self._release_if_held(entry)
            status = live_status(entry, view.problem)
            self._was_pending = status.state is State.PENDING
            return status
        if entry is None and view.asked_at < self._followed_since:
            return self._unasked(view.problem or "Slurm has not been asked yet")
        state = entry.state if entry is not None else "unknown to Slurm"
        if not self._is_confirmed(state, view, self._seconds_to_confirm(state)):
            text = f"is {state}, without a word of its own; it may be queued again."
            if state == "COMPLETED":
                text = f"has completed; waits for exit.json to appear in {self.attempt.path}"
                return JobStatus(State.PENDING, text, f"squeue: {state}", news=text)
            return JobStatus(State.RUNNING, message=text, source=f"squeue: {state}")
        entry = entry or self._queue.accounted(self.job_id)
        if entry is None:
            return self._forgotten()
        if not is_terminal(entry):
            return live_status(entry, view.problem)
        return self._write_ending(self._judge(word_of(entry, self._job_log_end())))

    def cancel(self, check: bool = True) -> None:  # noqa: FBT001, FBT002 (submitit's signature)
        """Have Slurm end the job: SIGTERM to its ranks and, after its KillWait, SIGKILL.

        A second call kills at once.

        Raises:
            ClusterUnreachable: Slurm does not answer; the job runs on.
        """
        again = self.attempt.cancel_path.exists()
        write_json(self.attempt.cancel_path, {"time": utc_now()})
        self.expect_end()
        if self._knows_id() or self._find():
            with contextlib.suppress(StageFailed):  # it has ended, and Slurm has forgotten it
                queue.cancel(self.job_id, self._environment, at_once=again)
        if check:
            self.wait()

    def wait_for_id(self) -> str:
        """Return the job's id; of one whose submission got no answer, once it is known.

        Raises:
            StageFailed: Slurm never got it.
        """
        while (status := self.search()) is not None:
            if status.is_finished:
                raise StageFailed(status.message)
            self._doze(1.0)
        return self.job_id

    def record(self) -> dict[str, Any]:
        """Return the content of job.json."""
        return dict(self._record)

    @property
    def _queue(self) -> SlurmQueue:
        return shared_queue(self._cluster)

    @property
    def _environment(self) -> dict[str, str]:
        return {**os.environ, **({"SLURM_CONF": self._cluster} if self._cluster else {})}

    def _look(self) -> QueueView:
        """Ask the queue; soon, where something has happened that Slurm must tell of."""
        ended_at = _modified_at(self.attempt.rank_exit_path(0))
        if ended_at != self._rank_zero_ended_at:
            self._rank_zero_ended_at = ended_at
            self.expect_end()
        now = self._queue.clock()
        is_new = self._queue.look().asked_at < self._followed_since
        is_urgent = is_new or self._vanishing is not None or now < self._urgent_until
        return self._queue.look(urgent=is_urgent)

    def expect_end(self) -> None:
        """Ask Slurm more often for a while: the job is about to end."""
        self._urgent_until = self._queue.clock() + _SECONDS_OF_URGENCY

    def _release_if_held(self, entry: JobEntry) -> None:
        """Let a job go that a node refused, once for each refusal."""
        if deserves_release(entry) and entry.restarts != self._released_restart:
            self._released_restart = entry.restarts
            with contextlib.suppress(StageFailed, ClusterUnreachable):  # its status says it is held
                queue.release(self.job_id, self._environment)
                self.expect_end()

    def _seconds_to_confirm(self, state: str) -> float:
        """Seconds for which Slurm must report a job as ended before it counts as ended."""
        if state == "CANCELLED" or self.attempt.cancel_path.exists():
            return _SECONDS_TO_CONFIRM_CANCELLED
        is_taken_back = any(ending.cause.is_taken_back for ending in self._endings())
        if is_taken_back or (self.attempt.path / REQUEUE_FILE).exists():
            return _SECONDS_TO_QUEUE_AGAIN
        if state == "COMPLETED":  # it has written exit.json, which is not visible here yet
            return SECONDS_TO_SEE_RECORDS
        return _SECONDS_TO_CONFIRM

    def _is_confirmed(self, state: str, view: QueueView, seconds: float) -> bool:
        """Say whether two answers, some seconds apart, agree that the job has ended."""
        if self._vanishing is None or self._vanishing[0] != state:
            self._vanishing = (state, view.asked_at)
        return view.asked_at - self._vanishing[1] >= seconds

    def _knows_id(self) -> bool:
        return self.job_id != _UNKNOWN

    def search(self) -> JobStatus | None:
        """Return what is known of a job while its id is not; None once it is."""
        return None if self._knows_id() else self._search(self._look())

    def _search(self, view: QueueView) -> JobStatus | None:
        """Look for a job whose launcher died between submitting it and learning its id."""
        if self._find(view):
            return None
        if view.asked_at >= self._followed_since and self._is_confirmed(
            "unknown", view, _SECONDS_TO_APPEAR
        ):
            why = f"Slurm has no job named {self._record.get('job_name')}: it never got this one."
            return JobStatus(Cause.NEVER_SUBMITTED, why, "squeue")
        return JobStatus(State.PENDING, message="is looked for in the queue.", source="job.json")

    def _find(self, view: QueueView | None = None) -> bool:
        """Learn the job's id from the job itself, or from Slurm by its name."""
        with contextlib.suppress(FileNotFoundError):
            self._job_id = (self.attempt.path / JOB_ID_FILE).read_text().strip() or _UNKNOWN
        entries = (view or self._queue.look(urgent=True)).entries.values()
        for entry in entries:
            if not self._knows_id() and entry.name == self._record.get("job_name"):
                self._job_id = self._own_id(entry.job_id.partition("_")[0])
        if self._knows_id():
            self._record["job_id"] = self.job_id
            self._vanishing = None
            write_json(self.attempt.job_path, self._record)
        return self._knows_id()

    def _own_id(self, job_or_array: str) -> str:
        """Return the job's id; in sweeps of earlier versions it is a task of an array of points."""
        task = self._record.get("task")
        return job_or_array if task is None else f"{job_or_array}_{task}"

    def _endings(self) -> list[RankEnding]:
        return read_endings(self.attempt, last_restart(self.attempt))

    def _unasked(self, why: str) -> JobStatus:
        """While Slurm says nothing, the job's own heartbeat does."""
        progress = self.attempt.read_progress()
        if progress is None:
            return JobStatus(State.PENDING, message=f"submitted; {why}.", source="job.json")
        text = f"{progress.get('phase')} at {progress.get('time')}; {why}"
        return JobStatus(State.RUNNING, message=text, source="progress.json")

    def _forgotten(self) -> JobStatus:
        """Neither queue nor accounting know the job any more, and it left no exit.json."""
        is_told = self.attempt.result_path.exists() or self.attempt.cancel_path.exists()
        if self._was_pending and not self._has_begun() and not is_told:
            # Slurm keeps no record of an array's task that is cancelled while it waits.
            why = "Slurm took it out of the queue (scancel, or what it waited for failed)"
            return self._write_ending(never_began(why))
        why = (
            f"Slurm has forgotten job {self.job_id}, there is no accounting that knows it, and it "
            f"wrote no exit.json: it was cancelled, or its nodes went down, while no launcher "
            f"followed it. `redco-flow resume` continues from the last checkpoint."
        )
        lost = (Cause.LOST, why)
        return JobStatus.ended(
            self._judge(ClusterWord(stopped=lost, silent=lost, unstarted=lost)), "squeue"
        )

    def _judge(self, word: ClusterWord) -> ExitRecord:
        return judge(
            self._endings(),
            read_call(self.attempt.call_path).resources.num_processes,
            word,
            has_result=self.attempt.result_path.exists(),
            was_cancelled=self.attempt.cancel_path.exists(),
        )

    def _has_begun(self) -> bool:
        is_noted = (self.attempt.path / JOB_ID_FILE).exists()
        return is_noted or bool(self.attempt.ranks_with_logs())

    def _write_ending(self, record: ExitRecord) -> JobStatus:
        if not self.attempt.exit_path.exists():
            write_exit(self.attempt, record)
        status = status_from_files(self.attempt)
        assert status is not None
        return status

    def _job_log_end(self) -> str:
        with contextlib.suppress(OSError):
            text = read_log_end(self.attempt.path / JOB_LOG, _LOG_END_BYTES)
            return redact_text(text, secret_values(os.environ)).strip()
        return ""


def _modified_at(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return None
