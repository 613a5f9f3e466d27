"""One Slurm job: its state from its own files first and Slurm's word second, and how to end it.

A job is found again from job.json alone: by its id, unique name and submit time or, if the launcher
died before it learnt the id, by its name. Asks Slurm through the queue that all jobs of a process
share. No single answer is final: an end is confirmed by a second one, a job that no answer has
lives while its heartbeat does, and a submission that was refused for a while is tried again.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from redco_flow.errors import ClusterUnreachable, StageFailed
from redco_flow.launch.call import read_call
from redco_flow.launch.endings import (
    ClusterWord,
    RankEnding,
    end_later_stages,
    judge,
    last_restart,
    never_began,
    never_submitted,
    read_endings,
    write_exit,
)
from redco_flow.launch.job import (
    CallJob,
    JobStatus,
    read_log_end,
    status_from_files,
)
from redco_flow.launch.rank import HeartbeatWatch
from redco_flow.launch.redaction import redact_text
from redco_flow.launch.slurm import queue
from redco_flow.launch.slurm.job_end import REQUEUE_FILE
from redco_flow.launch.slurm.queue import (
    JobEntry,
    NotAskedYet,
    QueueView,
    SlurmQueue,
    shared_queue,
)
from redco_flow.launch.slurm.resubmission import Resubmission
from redco_flow.launch.slurm.script import JOB_ID_FILE, JOB_LOG
from redco_flow.launch.slurm.states import (
    SECONDS_OF_URGENCY,
    SECONDS_TO_APPEAR,
    SECONDS_TO_CONFIRM,
    SECONDS_TO_CONFIRM_EMPTY,
    WAITING,
    deserves_release,
    is_same_job,
    is_terminal,
    live_status,
    waits_for_jobs,
    word_of,
)
from redco_flow.records import (
    SECONDS_TO_SEE_RECORDS,
    list_directory,
    read_json_if_present,
    write_json,
)
from redco_flow.spec.secrets import secret_values
from redco_flow.tracking.attempt import AttemptDirectory, Cause, ExitRecord, State
from redco_flow.tracking.locks import find_holder
from redco_flow.tracking.process_identity import utc_now
from redco_flow.tracking.sweep_directory import SweepDirectory

_UNKNOWN = "unknown"
_SECONDS_TO_CONFIRM_CANCELLED = 3.0
_SECONDS_TO_QUEUE_AGAIN = 60.0
_SECONDS_FOR_RECORDS = 2.0
_SECONDS_TO_APPEAR_IN_EMPTY = 20.0  # in answers without any job
_SECONDS_WITHOUT_QUEUE = 1800.0  # of a job that the accounting alone has, without a heartbeat
_LOG_END_BYTES = 1000
_LEFT_OVER = never_submitted("the packed job ended before its turn; another job runs it.")
_CANCELLED_IN_QUEUE = ExitRecord(
    exit_code=None,
    cause=Cause.CANCELLED,
    message="it was cancelled while its packed job waited in the queue.",
)


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
        self._quiet_until = float("-inf")
        self._rank_zero_ended_at: float | None = None
        self._vanishing: tuple[str, float] | None = None
        self._was_pending = False
        self._released_restart: int | None = None
        self._dropped_at = float("-inf")
        self._is_followed_by_heartbeat = False
        self._resubmission: Resubmission | None = None
        self._is_to_be_ended = False  # it was cancelled before its id was known
        group = [AttemptDirectory(Path(path)) for path in self._record.get("group", ())]
        index = group.index(self.attempt) if group else 0
        self._earlier, self._later = group[:index], group[index + 1 :]
        pack = self._record.get("pack")
        self._pack = AttemptDirectory(Path(pack)) if pack else None
        # The log there has Slurm's words.
        self._first = self._pack or (self._earlier[0] if self._earlier else self.attempt)

    def retry_submission(self, resubmission: Resubmission) -> None:
        """Have `status` submit the job, which sbatch has refused for a while, when it is due."""
        self._resubmission = resubmission
        self._note_waiting(resubmission.reason)

    @property
    def is_unsubmitted(self) -> bool:
        """Whether sbatch has refused the job for a while and is to be tried again."""
        return self._resubmission is not None

    @property
    def _limit(self) -> str:
        """The limit of submitted jobs that the job waits for; "" if it waits for none."""
        return "" if self._resubmission is None else self._resubmission.limit

    def status(self) -> JobStatus:
        """Say what exit.json says, else what Slurm says; asks Slurm at most every ten seconds.

        What Slurm calls an end counts once a second answer confirms it: a requeue may follow. A job
        that Slurm holds because a node could not start it is let go, to start on another. A stage
        whose turn in its job has not come is PENDING.
        """
        status = self._status_of_job()
        is_alone = not self._earlier and self._pack is None
        if is_alone or status.state is not State.RUNNING or self._has_begun():
            return status
        before = f"stage {self._earlier[-1].stage}" if self._earlier else "other points"
        text = f"{status.message}, with {before} before this one"
        return JobStatus(State.PENDING, message=text, source=status.source, news=text)

    def _status_of_job(self) -> JobStatus:
        if self._vanishing is not None:  # it may have ended, and NFS not show its records yet
            self._list_records()
        if status := status_from_files(self.attempt) or self._end_with_pack():
            return status
        if status := self.search():
            return status
        if self._is_to_be_ended:
            with contextlib.suppress(ClusterUnreachable):  # at the next look, again
                self._end()
                self._is_to_be_ended = False
        view = self._look()
        entry = self._own_entry(view)
        if entry is not None and not is_terminal(entry):
            self._vanishing = None
            self._is_followed_by_heartbeat = False
            self._note_submit_time(entry)
            self._release_if_held(entry)
            self._drop_dependencies(entry, view)
            status = live_status(entry, view.problem)
            self._was_pending = status.state is State.PENDING
            if self._was_pending and self._pack is not None and self.attempt.cancel_path.exists():
                # The script does not begin it, or once more after a requeue: it has an end.
                return self._write_ending(_CANCELLED_IN_QUEUE)
            return status
        if entry is None and view.asked_at < self._followed_since:
            return self._unasked(view.problem or "Slurm has not been asked yet")
        state = entry.state if entry is not None else "unknown to Slurm"
        if entry is None:
            self._queue.expect_accounted(self.job_id)
        if not self._is_confirmed(state, view, self._seconds_to_confirm(state, view)):
            text = f"is {state}, without a word of its own; it may be queued again."
            if state == "COMPLETED":
                text = f"has completed; waits for exit.json to appear in {self.attempt.path}"
                return JobStatus(State.PENDING, text, f"squeue: {state}", news=text)
            return JobStatus(State.RUNNING, message=text, source=f"squeue: {state}")
        try:
            entry = entry or self._accounted()
        except NotAskedYet:
            text = f"is {state}; the accounting has not answered yet."
            return JobStatus(State.RUNNING, message=text, source=f"squeue: {state}")
        if entry is None:
            return self._forgotten()
        if not is_terminal(entry):  # of the accounting, which may know more at the next request
            self._queue.forget_accounted(self.job_id)
            missed = view.asked_at - (self._vanishing or (state, view.asked_at))[1]
            if missed >= _SECONDS_WITHOUT_QUEUE and not self._has_heartbeat():
                return self._forgotten()
            return live_status(entry, view.problem)
        return self._write_ending(self._judge(word_of(entry, self._job_log_end())))

    def _list_records(self) -> None:
        ranks = self.attempt.path / "ranks"
        for folder in (self.attempt.path, ranks, *ranks.glob("*/")):
            list_directory(folder)

    def _end_with_pack(self) -> JobStatus | None:
        """The end of a stage whose packed job is known to have ended before its turn."""
        record = self._pack.read_exit() if self._pack is not None else None
        if record is None:
            return None
        self._list_records()
        if status := status_from_files(self.attempt):
            return status
        return None if self._has_begun() else self._write_ending(record)

    def cancel(self, check: bool = True) -> None:  # noqa: FBT001, FBT002 (submitit's signature)
        """Have Slurm end the job: SIGTERM to its ranks and, after its KillWait, SIGKILL.

        A second call kills at once. Of a packed job, only this stage ends, by its own supervisors.

        Raises:
            ClusterUnreachable: Slurm does not answer; the job runs on.
        """
        path = self.attempt.cancel_path
        again = bool((read_json_if_present(path) or {}).get("is_sent"))
        request = {"time": utc_now(), "is_sent": again}
        write_json(path, request)
        self.expect_end()
        if self._pack is not None:
            self._cancel_in_pack({**request, "is_sent": True, "at_once": again})
        elif self._limit and not self._find():
            why = f"it was cancelled while it waited for {self._limit}"
            self._write_ending(never_began(why))
        elif self._knows_id() or self._find():
            self._end(at_once=again)
            write_json(path, {**request, "is_sent": True})
        elif problem := self._queue.look().problem:
            raise ClusterUnreachable(
                f"the job, whose id is not known, was not cancelled: {problem}"
            )
        if check:
            self.wait()

    def _cancel_in_pack(self, request: Mapping[str, Any]) -> None:
        """Have this stage end, or not begin; with the last one that is left, the job ends."""
        write_json(self.attempt.cancel_path, request)  # its script and its ranks look for it
        if not self._has_begun():
            self._write_ending(never_began("it was cancelled before its turn in a packed job"))
        paths = self._member_paths
        # A sweep cancels the last first, so this ends at the first one, until all are cancelled.
        members = map(AttemptDirectory, map(Path, paths))
        is_last = all(one.exit_path.exists() or one.cancel_path.exists() for one in members)
        if paths and is_last and (self._knows_id() or self._find()):
            self._end(at_once=bool(request["at_once"]))

    @property
    def whole_has_ended(self) -> bool:
        """Whether the records of all stages that the job runs have their ends."""
        if self._pack is None:
            return all(one.cause is not None for one in (self.attempt, *self._later))
        paths = self._member_paths
        members = map(AttemptDirectory, map(Path, reversed(paths)))
        has_ended = bool(paths) and all(one.exit_path.exists() for one in members)
        return has_ended or self._pack.exit_path.exists()

    @property
    def _members(self) -> list[AttemptDirectory]:
        """The attempts that the job runs up to this one; of a packed job, all of them."""
        if self._pack is None:
            return [*self._earlier, self.attempt]
        return [AttemptDirectory(Path(path)) for path in self._member_paths]

    @property
    def _member_paths(self) -> Sequence[str]:
        """The packed attempts, in the order of their turns; none where their list is not seen."""
        return self._record_of_pack().get("members") or ()

    def _record_of_pack(self) -> Mapping[str, Any]:
        """job.json of the packed job as a whole; empty where there is none."""
        return (read_json_if_present(self._pack.job_path) if self._pack else None) or {}

    @functools.cached_property
    def _heartbeats(self) -> list[HeartbeatWatch]:
        return [HeartbeatWatch(one) for one in self._members]

    def _end(self, *, at_once: bool = False) -> None:
        """Send scancel to the job, if the id is still its own."""
        name = str(self._record.get("job_name") or "")
        if "_" in self.job_id:  # of a task that waits, scancel with a name ends the whole array
            name = ""
            entry = self._queue.look(urgent=True).entries.get(self.job_id)
            if entry is not None and not self._is_own(entry):
                return
        with contextlib.suppress(StageFailed):  # it has ended, and Slurm has forgotten it
            queue.cancel(self.job_id, name, self._environment, at_once=at_once)

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

    @property
    def _queue(self) -> SlurmQueue:
        return shared_queue(self._cluster)

    @property
    def _environment(self) -> dict[str, str]:
        return queue.environment_of(self._cluster)

    def _look(self) -> QueueView:
        """Ask the queue; soon, where something has happened that Slurm must tell of."""
        now = self._queue.clock()
        is_quiet = now < self._quiet_until
        ended_at = _modified_at(self.attempt.rank_exit_path(0))
        if ended_at != self._rank_zero_ended_at:
            self._rank_zero_ended_at = ended_at
            self.expect_end()
            if is_quiet or self._queue.view.asked_at >= self._followed_since:
                self.expect_records()
        if now < self._quiet_until:
            return self._queue.view
        is_new = self._queue.look().asked_at < self._followed_since
        is_urgent = is_new or self._awaits_answer(now) or now < self._urgent_until
        return self._queue.look(urgent=is_urgent)

    def _awaits_answer(self, now: float) -> bool:
        """Whether a second answer has to confirm the first; of a name that is looked for, soon."""
        if self._vanishing is None or self._is_followed_by_heartbeat:
            return False
        return not self.is_unsubmitted or now - self._vanishing[1] >= SECONDS_TO_APPEAR

    def expect_end(self) -> None:
        """Ask Slurm more often for a while: the job is about to end."""
        self._urgent_until = self._queue.clock() + SECONDS_OF_URGENCY

    def note_submitted(self) -> None:
        """Take the job, which sbatch has just accepted, for one that waits in the queue."""
        self._was_pending = True

    def expect_records(self) -> None:
        """Ask Slurm only after a moment, in which the job's own records may tell as much."""
        self._quiet_until = self._queue.clock() + _SECONDS_FOR_RECORDS

    def _release_if_held(self, entry: JobEntry) -> None:
        """Let a job go that a node refused, once for each refusal."""
        if deserves_release(entry) and entry.restarts != self._released_restart:
            self._released_restart = entry.restarts
            with contextlib.suppress(StageFailed, ClusterUnreachable):  # its status says it is held
                queue.release(self.job_id, self._environment)
                self.expect_end()

    def _drop_dependencies(self, entry: JobEntry, view: QueueView) -> None:
        """Have the job wait no longer for jobs that have completed and are in the queue again.

        A controller that was killed may have forgotten that they ran, and may hold them.
        """
        if not waits_for_jobs(entry) or view.asked_at == self._dropped_at:
            return
        self._dropped_at = view.asked_at
        own_id = self.job_id.partition("_")[0]  # the tasks of an array wait for the same jobs
        record = self._record_of_pack() if self._pack is not None else self._record
        before = {**record.get("waits_for", {}), **record.get("begins_after", {})}
        again = [
            job_id
            for path, job_id in before.items()
            if job_id in view.by_job
            and AttemptDirectory(Path(path)).cause is Cause.COMPLETED
            and SlurmJob(path, job_id)._is_queued_again(view)
            and self._queue.is_confirmed((own_id, job_id), view)
        ]
        if again:
            with contextlib.suppress(StageFailed, ClusterUnreachable):  # at a later answer, again
                if queue.drop_dependencies(own_id, again, self._environment):
                    self.expect_end()

    def _is_queued_again(self, view: QueueView) -> bool:
        """Whether a job, or an array, that has ended by its records waits in the queue."""
        waiting = [one for one in view.by_job[self.job_id] if one.state in WAITING]
        is_named = bool(self._record.get("job_name"))  # else the id may be another job's by now
        return is_named and any(map(self._is_own, waiting)) and self.whole_has_ended

    def _seconds_to_confirm(self, state: str, view: QueueView) -> float:
        """Seconds for which Slurm must report a job as ended before it counts as ended."""
        if None in self._lacking_upstream():
            return SECONDS_TO_SEE_RECORDS
        if state == "CANCELLED" or self.attempt.cancel_path.exists():
            return _SECONDS_TO_CONFIRM_CANCELLED
        if not view.entries:
            return SECONDS_TO_CONFIRM_EMPTY
        is_taken_back = any(ending.cause.is_taken_back for ending in self._endings())
        if is_taken_back or (self.attempt.path / REQUEUE_FILE).exists():
            return _SECONDS_TO_QUEUE_AGAIN
        if state == "COMPLETED":  # it has written exit.json, which is not visible here yet
            return SECONDS_TO_SEE_RECORDS
        return SECONDS_TO_CONFIRM

    def _is_confirmed(self, state: str, view: QueueView, seconds: float) -> bool:
        """Say whether two answers, some seconds apart, agree that the job has ended."""
        if self._vanishing is None or self._vanishing[0] != state:
            self._vanishing = (state, view.asked_at)
        return view.asked_at - self._vanishing[1] >= seconds

    def _knows_id(self) -> bool:
        return self.job_id != _UNKNOWN

    def _own_entry(self, view: QueueView) -> JobEntry | None:
        """Return the queue's entry of this job; None where another job has its id."""
        entry = view.entries.get(self.job_id)
        return entry if entry is not None and self._is_own(entry) else None

    def _accounted(self) -> JobEntry | None:
        """Return the accounting's entry of this job, as `_own_entry`.

        Raises:
            NotAskedYet: the answer is still to come.
        """
        entry = self._queue.accounted(self.job_id)
        return entry if entry is not None and self._is_own(entry) else None

    def _is_own(self, entry: JobEntry) -> bool:
        name, submitted_at = self._record.get("job_name"), self._record.get("slurm_submitted_at")
        return is_same_job(entry, name, submitted_at)

    def _note_submit_time(self, entry: JobEntry) -> None:
        """Keep the submit time that Slurm first reports; of a task of an array in memory only."""
        if self._record.get("slurm_submitted_at") is None and entry.submitted_at is not None:
            self._record["slurm_submitted_at"] = entry.submitted_at
            if self.attempt.job_path.exists():
                with contextlib.suppress(OSError):  # a reader of another user's run
                    write_json(self.attempt.job_path, self._record)

    def search(self) -> JobStatus | None:
        """Return what is known of a job while its id is not; None once it is."""
        if self._knows_id():
            return None
        again = self._resubmission
        is_cancelled = self.attempt.cancel_path.exists()
        if again is not None and again.seconds_left > SECONDS_TO_APPEAR and not is_cancelled:
            return self._waiting_status()
        return self._search(self._look())

    def _search(self, view: QueueView) -> JobStatus | None:
        """Look for a job whose launcher died, or got an error, before it learnt the id."""
        is_cancelled = self.attempt.cancel_path.exists()
        if self._find(view):
            self._is_to_be_ended = is_cancelled
            return None
        if status := self._end_with_pack():
            return status
        reason = self._record_of_pack().get("waiting")
        if reason and self._pack is not None and find_holder(_sweep_of(self._pack)) is not None:
            text = f"waiting: {reason}"  # the sweep's process submits it
            return JobStatus(State.PENDING, message=text, source="job.json", news=text)
        is_sure = bool(view.entries or self._limit)
        seconds = SECONDS_TO_APPEAR if is_sure else _SECONDS_TO_APPEAR_IN_EMPTY
        is_absent = view.asked_at >= self._followed_since and self._is_confirmed(
            "unknown", view, seconds
        )
        if not is_absent:
            return self._waiting_status()
        if is_cancelled:
            return self._write_ending(never_began("it was cancelled before Slurm accepted it"))
        if self._resubmission is not None:
            return self._submit_again(self._resubmission)
        why = f"Slurm has no job named {self._record.get('job_name')}: it never got this one."
        return JobStatus(Cause.NEVER_SUBMITTED, why, "squeue")

    def _submit_again(self, resubmission: Resubmission) -> JobStatus | None:
        """Submit a job that the queue does not have, if it is due; None once Slurm has it."""
        if resubmission.seconds_left > 0:
            return self._waiting_status()
        self._vanishing = None
        try:
            job_id = resubmission.try_again()
        except StageFailed as refusal:
            self._resubmission = None
            self._record.pop("waiting", None)
            write_json(self.attempt.job_path, self._record)
            return self._write_ending(never_submitted(str(refusal)))
        self._followed_since = self._queue.clock()
        if not job_id:
            self._note_waiting(resubmission.reason)
            return self._waiting_status()
        self._set_id(job_id)
        return None

    def _waiting_status(self) -> JobStatus:
        """The status of a job without an id: it may be in the queue, or is to be submitted."""
        reason = self._record.get("waiting")
        text = f"waiting: {reason}" if reason else "is looked for in the queue."
        news = text if self._resubmission is not None else ""
        return JobStatus(State.PENDING, message=text, source="job.json", news=news)

    def _note_waiting(self, reason: str) -> None:
        """Record why sbatch is to be tried again, for who looks at the run meanwhile."""
        if self._record.get("waiting") != reason:
            self._record["waiting"] = reason
            write_json(self.attempt.job_path, self._record)

    def _set_id(self, job_id: str) -> None:
        self._job_id = job_id
        self._record["job_id"] = job_id
        self._record.pop("waiting", None)
        self._resubmission = None
        self._vanishing = None
        for one in (*(self._later if self._pack is None else ()), self.attempt):
            record = {**self._record, "attempt": str(one.path)}
            if one is self.attempt or (one.read_job() or {}).get("job_id") == "":
                write_json(one.job_path, record)

    def _find(self, view: QueueView | None = None) -> bool:
        """Learn the job's id from the job itself, or from Slurm by its name."""
        found = str(self._record_of_pack().get("job_id") or "")
        with contextlib.suppress(FileNotFoundError):
            found = found or (self._first.path / JOB_ID_FILE).read_text().strip()
        for entry in (view or self._queue.look(urgent=True)).entries.values():
            if not found and entry.name == self._record.get("job_name"):
                found = self._own_id(entry.job_id.partition("_")[0])
        if found:
            self._set_id(found)
        return bool(found)

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
        self._is_followed_by_heartbeat = self._has_heartbeat()
        if self._is_followed_by_heartbeat:
            text = f"runs by its heartbeat, though Slurm shows no job {self.job_id} of this name"
            return JobStatus(State.RUNNING, message=text, source="heartbeat", news=text)
        is_told = self.attempt.result_path.exists() or self.attempt.cancel_path.exists()
        if self._was_pending and not self._has_begun() and not is_told:
            # Slurm keeps no record of an array's task that is cancelled while it waits.
            why = "Slurm took it out of the queue (scancel, or what it waited for failed)"
            try:
                self._end()  # of a queue that shows too little
            except ClusterUnreachable as error:
                return JobStatus(State.PENDING, message=f"is not in the queue; {error}")
            return self._write_ending(_LEFT_OVER if self._lacking_upstream() else never_began(why))
        why = (
            f"Slurm has forgotten job {self.job_id}, there is no accounting that knows it, and it "
            f"wrote no exit.json: it was cancelled, or its nodes went down, while no launcher "
            f"followed it. `redco-flow resume` continues from the last checkpoint."
        )
        lost = (Cause.LOST, why)
        record = self._judge(ClusterWord(stopped=lost, silent=lost, unstarted=lost))
        if record.cause is Cause.NEVER_SUBMITTED:
            return self._write_ending(record)
        return JobStatus.ended(record, "squeue")

    def _judge(self, word: ClusterWord) -> ExitRecord:
        if self._is_left_over(word):
            return _LEFT_OVER
        without_result = (one for one in self._earlier if not one.result_path.exists())
        if (culprit := next(without_result, None)) is not None:
            why = f"stage {culprit.stage}, before it in the same job, did not complete"
            return never_began(why)
        return judge(
            self._endings(),
            read_call(self.attempt.call_path).resources.num_processes,
            word,
            has_result=self.attempt.result_path.exists(),
            was_cancelled=self.attempt.cancel_path.exists(),
        )

    def _is_left_over(self, word: ClusterWord) -> bool:
        """Whether a packed job ended after others had begun and before this; not by scancel.

        Or before all, because it was to wait for a stage that has failed.
        """
        if self._pack is None or self._has_begun() or self.attempt.cancel_path.exists():
            return False
        if self._lacking_upstream():
            return True
        is_cancelled = word.decided is not None and word.decided[0] is Cause.CANCELLED
        return not is_cancelled and any(one.ranks_with_logs() for one in self._members)

    def _lacking_upstream(self) -> set[Cause | None]:
        """Causes of ends without a result, of stages for which the whole packed job waits.

        None: Slurm says that such a job has ended, and there is no record of that yet.
        """
        by_job = self._queue.look().by_job
        found: set[Cause | None] = set()
        for path, job_id in self._record_of_pack().get("waits_for", {}).items():
            list_directory(Path(path))
            cause = AttemptDirectory(Path(path)).cause
            its = by_job.get(job_id, ())
            is_live = any(not is_terminal(one) or one.state == "COMPLETED" for one in its)
            if cause is not Cause.COMPLETED and (cause is not None or not is_live):
                found.add(cause)
        return found

    def _has_heartbeat(self) -> bool:
        return sum(one.is_alive() for one in self._heartbeats) > 0  # each is to look

    def _has_begun(self) -> bool:
        is_noted = (self.attempt.path / JOB_ID_FILE).exists()
        return is_noted or bool(self.attempt.ranks_with_logs())

    def _write_ending(self, record: ExitRecord) -> JobStatus:
        if not self.attempt.exit_path.exists():
            pack = self._pack if record.cause is Cause.NEVER_SUBMITTED else None
            if pack is not None and not pack.exit_path.exists():
                write_exit(pack, record)  # so others know at once, and are packed together
            write_exit(self.attempt, record)
            if record.cause is not Cause.COMPLETED and pack is None:
                end_later_stages(self._later, self.attempt, record.cause)
        # What another host wrote first counts, but may not be visible here yet.
        return status_from_files(self.attempt) or JobStatus.ended(record, "exit.json")

    def _job_log_end(self) -> str:
        texts = []
        for path in dict.fromkeys([self._first.path, self.attempt.path]):
            with contextlib.suppress(OSError):
                texts.append(read_log_end(path / JOB_LOG, _LOG_END_BYTES))
        return redact_text("\n".join(texts), secret_values(os.environ)).strip()


def _sweep_of(pack: AttemptDirectory) -> SweepDirectory:
    """The sweep whose process submits a packed job."""
    return SweepDirectory(pack.path.parents[1])


def _modified_at(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return None
