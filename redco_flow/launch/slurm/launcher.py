"""The Slurm job that drives a run in place of a process of the login node: submit, look, cancel.

Its record is in the run's directory; the job is known by its unique name, so that one whose
submission got no answer is found, too. Slurm starts it again after a preemption or a node failure,
and its script has Slurm start it again at the end of its time.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from redco_flow.errors import ClusterUnreachable, StageFailed
from redco_flow.launch.executor import LauncherJob
from redco_flow.launch.job import JobStatus
from redco_flow.launch.slurm import queue
from redco_flow.launch.slurm.queue import JobEntry, QueueView, SlurmQueue, shared_queue
from redco_flow.launch.slurm.script import JOB_LOG, Submission, render_launcher
from redco_flow.launch.slurm.states import (
    SECONDS_OF_URGENCY,
    SECONDS_TO_APPEAR,
    SECONDS_TO_CONFIRM,
    SECONDS_TO_CONFIRM_EMPTY,
    is_terminal,
    live_status,
)
from redco_flow.records import write_json, write_text
from redco_flow.tracking.attempt import Cause, State
from redco_flow.tracking.process_identity import utc_now

_SECONDS_BETWEEN_LOOKS = 0.5
_MAX_SECONDS_TO_CONFIRM = 2 * SECONDS_TO_CONFIRM_EMPTY


class SlurmLauncherJob(LauncherJob):
    """A job that drives a run.

    Args:
        record: of `submit`.
    """

    def __init__(self, record: Mapping[str, Any]) -> None:
        self._record = record
        self._is_known_live = False
        self._ended_since: float | None = None
        self._is_confirmed = False
        self._asked_since = self._asked_at = float("-inf")

    @property
    def job_id(self) -> str:
        """Its id; "" where sbatch gave none."""
        return str(self._record["job_id"])

    def status(self) -> JobStatus:
        """Return PENDING or RUNNING, or LOST once Slurm has no such job any more.

        Where this process has seen the job alive, a second answer has to confirm its end; to any
        other process the first answer is shown, which `confirmed_status` does not rely on.
        """
        now = self._queue.clock()
        if now - self._asked_at > SECONDS_OF_URGENCY:
            self._asked_since = now  # it has driven the run until now
        self._asked_at = now
        is_new = now - self._asked_since < SECONDS_OF_URGENCY
        view = self._queue.look(urgent=is_new or self._ended_since is not None)
        entry = self._find(view)
        if entry is not None and not is_terminal(entry):
            self._is_known_live, self._ended_since = True, None
            return live_status(entry, view.problem)
        if view.asked_at == float("-inf"):
            return JobStatus(State.PENDING, f"is not known: {view.problem.rstrip('.')}", "squeue")
        word = f"is {entry.state} in Slurm" if entry is not None else "is not known to Slurm"
        if self._ended_since is None:
            self._ended_since = view.asked_at
        seconds = SECONDS_TO_CONFIRM if view.entries else SECONDS_TO_CONFIRM_EMPTY
        self._is_confirmed = view.asked_at - self._ended_since >= seconds
        if self._is_known_live and not self._is_confirmed:
            return JobStatus(State.RUNNING, f"{word}; it may be queued again", "squeue")
        return JobStatus(Cause.LOST, word, "squeue")

    def confirmed_status(self) -> JobStatus:
        """As `LauncherJob`."""
        deadline = time.monotonic() + _MAX_SECONDS_TO_CONFIRM
        while (status := self.status()).is_finished and not self._is_confirmed:
            if time.monotonic() > deadline:
                raise ClusterUnreachable(
                    f"job {self._record['job_name']} {status.message}, but squeue gave no second "
                    f"answer that confirms it. Try again when squeue works."
                )
            time.sleep(_SECONDS_BETWEEN_LOOKS)
        return status

    def cancel(self) -> None:
        """Have Slurm end the job; one that has ended already is left as it is.

        Raises:
            ClusterUnreachable: there is no answer; the job is not cancelled.
        """
        entry = self._find(self._queue.look(urgent=True))
        job_id = entry.job_id if entry is not None else self.job_id
        with suppress(StageFailed):  # it has ended, and Slurm has forgotten it
            if job_id:
                queue.cancel(job_id, self._record["job_name"], queue.environment_of(self._cluster))

    def _find(self, view: QueueView) -> JobEntry | None:
        name = self._record["job_name"]
        return next((one for one in view.entries.values() if one.name == name), None)

    @property
    def _cluster(self) -> str:
        return str(self._record["cluster"])

    @property
    def _queue(self) -> SlurmQueue:
        return shared_queue(self._cluster)


def submit(
    submission: Submission,
    words: Sequence[str],
    record_path: Path,
    log: Path,
    environment: Mapping[str, str],
) -> SlurmLauncherJob:
    """Submit the job, and write its record first.

    Args:
        words: the module and its arguments; `--job-name NAME --job ID` is added.
        log: gets the process's output.
        environment: of sbatch, which hands it on.

    Raises:
        StageFailed, ClusterUnreachable: Slurm refuses it, there is no sbatch, or sbatch gave no
            answer. The record stays only in the last case, where the job may start.
    """
    folder = submission.attempt
    (folder / JOB_LOG).parent.mkdir(parents=True)
    cluster = queue.cluster_of(environment)
    record = {
        "job_id": "",
        "job_name": submission.job_name,
        "cluster": cluster,
        "submitted_at": utc_now(),
    }
    write_text(folder / "job.sh", render_launcher(submission, words, log))
    write_json(record_path, record)
    try:
        record["job_id"] = queue.submit(folder / "job.sh", environment)
    except (StageFailed, ClusterUnreachable) as refusal:
        if not isinstance(refusal, queue.TryLater) or refusal.limit:
            record_path.unlink()
            raise
        time.sleep(SECONDS_TO_APPEAR)  # it may have been accepted all the same
        record["job_id"] = _find_id(submission.job_name, cluster)
        if not record["job_id"]:
            raise
    write_json(record_path, record)
    return SlurmLauncherJob(record)


def _find_id(name: str, cluster: str) -> str:
    """Return the id of the job of this name; "" where squeue has none, or gives no answer."""
    with suppress(StageFailed, ClusterUnreachable):
        for entry in queue.list_jobs(queue.environment_of(cluster)).values():
            if entry.name == name:
                return entry.job_id
    return ""
