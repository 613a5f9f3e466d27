"""Bring one job on hosts from its first try for hosts to its exit.json, from any process.

A controller that takes over goes on where the last one stopped. A link that breaks ends nothing:
the ranks run on, and the controller comes back to them. Runs in a separate thread; the current
state is in `status`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping

from redco_flow.errors import RedcoFlowError, RunCancelled
from redco_flow.launch.call import read_call
from redco_flow.launch.endings import write_exit
from redco_flow.launch.hosts.allocation import HostsRecord
from redco_flow.launch.hosts.connection import HostConnection
from redco_flow.launch.hosts.earlier_attempts import delete_jobs
from redco_flow.launch.hosts.file_sets import FileSet
from redco_flow.launch.hosts.following import GroupFollowing, ending_of
from redco_flow.launch.hosts.ssh import HostUnreachable
from redco_flow.launch.hosts.start import JobStart, StartedJob
from redco_flow.launch.job import JobStatus
from redco_flow.tracking.attempt import AttemptDirectory, Cause, ExitRecord, State
from redco_flow.tracking.results import StageResult, publish_result


async def collect_result(connection: HostConnection, job: StartedJob) -> bool:
    """Copy the result of the job's fingerprint; return whether the host has one.

    Raises:
        HostUnreachable, HostRefused, ArtifactError, OSError: what is here by then is kept.
    """
    offered = await connection.ask(
        "offer", workspace=str(connection.workspace.root), fingerprint=job.call.fingerprint
    )
    if offered["result"] is None:
        return False
    await connection.pull([FileSet.from_json(one) for one in offered["sets"]], job.workspace)
    publish_result(job.workspace, StageResult(**offered["result"]))
    return True


_SECONDS_BETWEEN_TRIES = 3.0


def _last_known(attempt: AttemptDirectory, record: HostsRecord) -> JobStatus:
    """Return the state of a job from its files, before any host has answered."""
    if attempt.read_progress() is None:
        return JobStatus(State.PENDING, message="is being submitted.", source="job.json")
    message = f"runs on {', '.join(record.hosts)}, by what was last heard."
    return JobStatus(State.RUNNING, message=message, source="progress.json")


class JobController:
    """One job.

    Args:
        inherited: this process's environment, for the values that the profile forwards.
    """

    def __init__(
        self, attempt: AttemptDirectory, record: HostsRecord, inherited: Mapping[str, str]
    ) -> None:
        self.status = _last_known(attempt, record)
        self._attempt = attempt
        self._record = record
        self._inherited = inherited

    def run(self) -> None:
        """Return once exit.json is written and the hosts had time to delete what is here."""
        asyncio.run(self._drive())

    async def _drive(self) -> None:
        try:
            call = read_call(self._attempt.call_path)
            start = JobStart(self._attempt, call, self._record, self._inherited, self._tell)
            job = await start.start()
        except (RedcoFlowError, OSError) as error:
            cause = Cause.CANCELLED if isinstance(error, RunCancelled) else Cause.FAILED
            record = ExitRecord(exit_code=None, cause=cause, message=str(error))
            write_exit(self._attempt, record)
            return
        following = GroupFollowing(job, self._tell_running)
        fates = await following.until_ended()
        if has_collected := await self._has_collected(job):
            following.keep_result()
        write_exit(self._attempt, ending_of(job, fates))
        if has_collected and not job.record.is_shared:
            await self._delete(job)
        job.close()

    async def _has_collected(self, job: StartedJob) -> bool:
        """Bring the result here, if there is one; a full disk or a broken link only delays it."""
        connection = job.connections[0]
        while not job.record.is_shared:
            try:
                if not connection.is_open:
                    await connection.open()
                return await collect_result(connection, job)
            except (RedcoFlowError, OSError) as error:
                connection.close()
                if isinstance(error, HostUnreachable):
                    connection.note_silence()
                    if connection.is_lost(job.record.settings.lost_after_minutes * 60):
                        return False
                self._tell_running(f"has ended on {connection.label}; not copied yet: {error}")
            await asyncio.sleep(_SECONDS_BETWEEN_TRIES)
        return True

    async def _delete(self, job: StartedJob) -> None:
        """Have the hosts delete the stage's folders; a host that does not hear keeps them."""
        for connection in job.connections:
            with contextlib.suppress(RedcoFlowError, OSError):
                if not connection.is_open:
                    await connection.open()
                await connection.ask("release", directory=connection.directory, owner=job.owner)
                await delete_jobs(connection, job.attempts)

    def _tell(self, status: JobStatus) -> None:
        self.status = status

    def _tell_running(self, message: str) -> None:
        self.status = JobStatus(State.RUNNING, message=message, source="ssh", news=message)
