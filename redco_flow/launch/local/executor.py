"""Jobs on this machine: each a detached supervisor with one worker.

Knows how to start a supervisor and to find it again by process id *and* start time. Keeps no
handle on it: a job is the same for the process that submitted it and for any other.
"""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

from redco_flow.errors import UsageError
from redco_flow.launch.executor import CallExecutor, common_settings
from redco_flow.launch.host_facts import Finding
from redco_flow.launch.job import (
    CallJob,
    JobStatus,
    status_from_files,
    status_without_supervisor,
)
from redco_flow.launch.node_disk import look_at_node_disk, node_disk_finding
from redco_flow.launch.processes import kill_processes_of
from redco_flow.spec.profile import Profile
from redco_flow.tracking.attempt import AttemptDirectory, State
from redco_flow.tracking.process_identity import ProcessIdentity


class LocalJob(CallJob):
    """A job of this machine, found by its supervisor."""

    @cached_property
    def _supervisor(self) -> ProcessIdentity:
        return ProcessIdentity.from_json(self._record["supervisor"])

    def status(self) -> JobStatus:
        """Say what exit.json says, else what the process table says."""
        if status := status_from_files(self.attempt):
            return status
        if self._supervisor.is_alive():
            return JobStatus(
                State.RUNNING, message=f"supervised by {self._supervisor}.", source="process table"
            )
        # It may have written its record and left between the two looks.
        return status_from_files(self.attempt) or status_without_supervisor(
            self.attempt, self._why_lost()
        )

    def cancel(self, check: bool = True) -> None:  # noqa: FBT001, FBT002 (submitit's signature)
        """Ask the supervisor to stop the worker; a second call kills it at once.

        Of a lost job, kill what it left behind.

        Raises:
            UsageError: the job runs on another machine.
        """
        if self._supervisor.host != os.uname().nodename and not self.done():
            raise UsageError(f"job {self.job_id} runs on {self._supervisor.host}; cancel it there.")
        if not _send(self._supervisor, signal.SIGTERM):
            kill_processes_of(self.attempt.path)
        if check:
            self.wait()

    @property
    def records_may_be_late(self) -> bool:
        """Whether it runs on another host than this one."""
        return self._supervisor.host != os.uname().nodename

    def _why_lost(self) -> str:
        return (
            f"the job's supervisor ({self._supervisor}) is gone without a word on how the worker "
            f"ended: it was killed (kill -9 or the out-of-memory killer) or the machine was "
            f"restarted. The worker died with it; nothing was published. See {self.paths.stdout}; "
            f"`redco-flow resume` continues from the last checkpoint."
        )

    def _doze(self, seconds: float) -> None:
        """Sleep until the supervisor ends, for it writes exit.json just before."""
        handle = _open(self._supervisor)
        if handle is None:  # just gone, or of another machine
            super()._doze(seconds)
            return
        try:
            poll = select.poll()
            poll.register(handle, select.POLLIN)
            poll.poll(min(seconds, 1.0) * 1000)
        finally:
            os.close(handle)


class LocalExecutor(CallExecutor):
    """Runs each call under a supervisor of its own, which outlives the submitter."""

    job_class = LocalJob

    @classmethod
    def name(cls) -> str:
        """Return the name for submitit's AutoExecutor, whose own `local` pickles."""
        return "redco-local"

    def examine(self, gpus_per_host: int) -> Iterator[Finding]:
        """Yield what this machine has of the disk that stages are to use."""
        disk = look_at_node_disk(self._node_directory, self._environment)
        if disk is not None:
            yield node_disk_finding({os.uname().nodename: disk})

    def _submit(self, attempt: AttemptDirectory) -> LocalJob:
        attempt = AttemptDirectory(attempt.path.absolute())
        attempt.logs.mkdir(exist_ok=True)
        command, log = self.supervisor_command(attempt), attempt.log_path(0)
        record = self._start_detached("the supervisor", command, attempt, log)
        return LocalJob(attempt.path, record["job_id"], record=record)


def make(profile: Profile, environment: Mapping[str, str]) -> LocalExecutor:
    """Return the executor for a profile."""
    return LocalExecutor(
        profile.workspace, profile.section, **common_settings(profile, environment)
    )


def reattach(record: Mapping[str, Any]) -> LocalJob:
    """Return the job of a record, from any process.

    Raises:
        ValueError, KeyError: it is not a local job's record.
    """
    ProcessIdentity.from_json(record["supervisor"])  # a bad one is refused here
    return LocalJob(record["attempt"], record["job_id"], record=record)


def _open(process: ProcessIdentity) -> int | None:
    """Return a handle (pidfd) of exactly this process; None if it is gone or elsewhere."""
    try:
        handle = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return None
    # Checked after opening: from here on the handle cannot come to mean another process.
    if process.is_running_here():
        return handle
    os.close(handle)
    return None


def _send(process: ProcessIdentity, number: signal.Signals) -> bool:
    """Signal exactly this process; say whether it was there."""
    handle = _open(process)
    if handle is None:
        return False
    try:
        signal.pidfd_send_signal(handle, number)
    except ProcessLookupError:
        return False
    except PermissionError as error:
        raise UsageError(f"{process} belongs to another user, who alone can stop it.") from error
    finally:
        os.close(handle)
    return True
