"""Start a job on hosts: allocate free ones, upload code and inputs, start the ranks.

Decisions are written to job.json at once, and started ranks are recorded on the hosts, so
repeating it after a launcher died starts nothing twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from redco_flow.errors import RedcoFlowError, RunCancelled
from redco_flow.launch.call import Call
from redco_flow.launch.hosts.allocation import HostsRecord, allocate
from redco_flow.launch.hosts.call_files import collect_inputs, rewrite_paths
from redco_flow.launch.hosts.code_snapshot import take_snapshot
from redco_flow.launch.hosts.connection import HostConnection, is_shared
from redco_flow.launch.hosts.earlier_attempts import (
    bring_home,
    fetch_checkpoints,
    left_on,
)
from redco_flow.launch.hosts.ranks import RanksOrder
from redco_flow.launch.hosts.ssh import HostRefused, HostUnreachable
from redco_flow.launch.job import JobStatus
from redco_flow.launch.processes import RankInfo
from redco_flow.records import write_json
from redco_flow.tracking.attempt import AttemptDirectory, State
from redco_flow.tracking.workspace import Workspace, user_name

_SECONDS_BETWEEN_TRIES = 2.0
_SECONDS_BETWEEN_RENEWALS = 15.0
_SECONDS_TO_BEGIN = 90.0

Tell = Callable[[JobStatus], None]


@dataclass
class StartedJob:
    """A job whose ranks have been started.

    Args:
        record: the content of job.json.
        connections: its hosts, in the order of their ranks.
    """

    attempt: AttemptDirectory
    call: Call
    record: HostsRecord
    connections: list[HostConnection]

    @property
    def workspace(self) -> Workspace:
        """The launcher's."""
        return Workspace(Path(self.call.workspace))

    @property
    def work(self) -> str:
        """The name of the stage's working directory, in every workspace."""
        return self.workspace.work_directory(self.call.fingerprint).name

    def rank_infos(self, connection: HostConnection) -> list[RankInfo]:
        """Return the ranks of one host."""
        resources = self.call.resources
        first = self.connections.index(connection) * resources.processes_per_host
        return [
            RankInfo(
                rank=first + local,
                num_processes=resources.num_processes,
                local_rank=local,
                processes_per_host=resources.processes_per_host,
                gpus_per_host=resources.gpus_per_host,
                rendezvous_seconds=self.record.settings.rendezvous_seconds,
                shares_disk=int(self.record.is_shared or resources.num_hosts == 1),
            )
            for local in range(resources.processes_per_host)
        ]

    def host_of(self, rank: int) -> str:
        """Return the label of the host that a rank is on."""
        return self.connections[rank // self.call.resources.processes_per_host].label

    @property
    def attempts(self) -> list[AttemptDirectory]:
        """The stage's attempts up to this one."""
        numbers = range(1, self.attempt.number + 1)
        return [AttemptDirectory(self.attempt.path.with_name(str(one))) for one in numbers]

    def attempt_on(self, connection: HostConnection) -> Path:
        """Return the attempt's directory on a host."""
        return self.record.attempt_on(connection.workspace, self.call)

    @property
    def owner(self) -> dict[str, Any]:
        """The name of the job in the hosts' leases."""
        return {
            "attempt": self.record.job_id,
            "run": self.call.run,
            "stage": self.call.stage,
            "launcher": f"{user_name()}@{os.uname().nodename}",
        }

    def close(self) -> None:
        """Leave the hosts; the ranks run on."""
        for connection in self.connections:
            connection.close()


class JobStart:
    """The start of one job.

    Args:
        inherited: this process's environment, for the values that the profile forwards.
        tell: takes what the job waits for.
    """

    def __init__(
        self,
        attempt: AttemptDirectory,
        call: Call,
        record: HostsRecord,
        inherited: Mapping[str, str],
        tell: Tell,
    ) -> None:
        self._job = StartedJob(attempt, call, record, [])
        self._inherited = inherited
        self._tell = tell
        # Two hosts may have the same checkpoint.
        self._fetching = asyncio.Lock()
        self._may_have_begun = bool(record.hosts)  # by a launcher before this one

    async def start(self) -> StartedJob:
        """Return the job once every rank has been started.

        Also where ranks may run on a host that does not answer: one that is silent for too long,
        or a job that is cancelled, is left to who follows it.

        Raises:
            DoesNotFit, HostRefused: it cannot be; nothing of it is left on the hosts.
            RunCancelled: it was cancelled before any rank began; likewise.
        """
        try:
            await self._have_hosts()
            while not self._is_left_to_follower() and not await self._all_begun():
                await self._doze(_SECONDS_BETWEEN_TRIES)
        except BaseException:
            await self._withdraw()
            raise
        return self._job

    def _is_left_to_follower(self) -> bool:
        """Whether nothing more is to be started: the job is cancelled, or a host is lost."""
        seconds = self._job.record.settings.lost_after_minutes * 60
        is_cancelled = self._may_have_begun and self._job.attempt.cancel_path.exists()
        return is_cancelled or any(one.is_lost(seconds) for one in self._job.connections)

    async def _have_hosts(self) -> None:
        """Take free hosts, unless job.json says which were taken."""
        job, settings = self._job, self._job.record.settings
        snapshot = await asyncio.to_thread(take_snapshot)
        if job.record.hosts:
            known = {host.label: host for host in settings.addresses}
            hosts = [known[label] for label in job.record.hosts]
            job.connections = [HostConnection(host, settings, snapshot) for host in hosts]
            return
        resources = job.call.resources
        while True:
            self._raise_if_cancelled()
            tried = await allocate(settings, resources, self._job.owner, snapshot)
            if tried.connections:
                break
            reasons = "; ".join(f"{label}: {why}" for label, why in tried.why_not.items())
            self._wait(f"waits for {resources.num_hosts} free hosts ({reasons})")
            await self._doze(_SECONDS_BETWEEN_TRIES)
        job.connections = tried.connections
        shared = settings.shared_workspace
        if shared is None:
            shared = await is_shared(job.workspace, job.connections)
        labels = [connection.label for connection in job.connections]
        job.record = replace(job.record, hosts=labels, is_shared=shared)
        write_json(job.attempt.job_path, job.record.to_json())

    async def _all_begun(self) -> bool:
        """Try to start every host's ranks; say whether all answered."""
        # All of them resume from the newest checkpoint, whichever host has it.
        return await self._on_all(self._bring_home) and await self._on_all(self._begin_on)

    async def _on_all(self, act: Callable[[HostConnection], Awaitable[None]]) -> bool:
        """Do something on every host; say whether all answered."""
        connections = self._job.connections
        done = await asyncio.gather(*map(act, connections), return_exceptions=True)
        errors = []
        for connection, error in zip(connections, done, strict=True):
            if isinstance(error, HostUnreachable):
                errors.append(error)
                connection.close()  # it is opened again
                connection.note_silence()
            elif error is not None:
                raise error
        if errors:
            self._wait(f"cannot be started yet: {errors[0]}")
        return not errors

    async def _bring_home(self, connection: HostConnection) -> None:
        """Take what earlier attempts left on a host and was not fetched."""
        job = self._job
        if job.call.attempt == 1 or job.record.is_shared:
            return
        async with self._preparing(connection):
            for one in await left_on(connection, job.attempts[:-1]):
                await bring_home(connection, one)
            async with self._fetching:
                await fetch_checkpoints(connection, job.workspace, job.call.fingerprint)

    async def _begin_on(self, connection: HostConnection) -> None:
        async with self._preparing(connection):
            brought = {} if self._job.record.is_shared else await self._bring(connection)
        self._raise_if_cancelled()
        self._may_have_begun = True  # also where no answer comes
        answer = await connection.ask(
            "begin",
            _SECONDS_TO_BEGIN,
            directory=connection.directory,
            owner=self._job.owner,
            order=asdict(self._order(connection)),
            **{"call": None, "uses": [connection.code], **brought},
        )
        if answer["holder"]:
            raise HostRefused(f"{connection.label} was taken meanwhile by {answer['holder']}.")

    async def _bring(self, connection: HostConnection) -> dict[str, Any]:
        """Copy what the call reads; return the call as the host sees it, and what it reads."""
        job = self._job
        files = await asyncio.to_thread(collect_inputs, job.call, job.workspace)
        own = [job.attempt_on(connection).parents[3], connection.workspace.work / job.work]
        read = [one.thing(connection.workspace) for one in files.sets]
        uses = [connection.code, *map(str, own), *map(str, read)]
        # What is there is kept from now on; what is not, comes.
        await connection.ask("acquire", directory=connection.directory, owner=job.owner, uses=uses)
        await connection.push(files.sets, files.sources)
        call = rewrite_paths(job.call, files, connection.workspace)
        return {"call": asdict(call), "kept_steps": files.steps, "uses": uses}

    def _order(self, connection: HostConnection) -> RanksOrder:
        record, walltime = self._job.record, self._job.call.resources.walltime_minutes
        forwarded = {
            name: self._inherited[name]
            for name in record.settings.forward_environment
            if name in self._inherited
        }
        return RanksOrder(
            attempt=str(self._job.attempt_on(connection)),
            rank_infos=[asdict(rank_info) for rank_info in self._job.rank_infos(connection)],
            stall_seconds=record.stall_seconds,
            grace_seconds=record.grace_seconds,
            environment={**forwarded, **record.environment, **connection.search_variables},
            walltime_seconds=None if walltime is None else walltime * 60.0,
        )

    @contextlib.asynccontextmanager
    async def _preparing(self, connection: HostConnection) -> AsyncIterator[None]:
        """Keep a host's lease while files are copied."""
        if not connection.is_open:
            await connection.open()
            connection.note_word()
        self._wait(f"is being prepared on {', '.join(self._job.record.hosts)}")
        renewing = asyncio.create_task(self._renew(connection))
        try:
            yield
        finally:
            renewing.cancel()

    async def _renew(self, connection: HostConnection) -> None:
        while True:
            await asyncio.sleep(_SECONDS_BETWEEN_RENEWALS)
            with contextlib.suppress(HostUnreachable, HostRefused):
                await connection.ask(
                    "acquire", directory=connection.directory, owner=self._job.owner
                )

    async def _withdraw(self) -> None:
        """Leave nothing of a job that does not start."""
        for connection in self._job.connections:
            with contextlib.suppress(RedcoFlowError):
                if connection.is_open:
                    if self._may_have_begun:
                        attempt = str(self._job.attempt_on(connection))
                        await connection.ask("end", attempt=attempt, at_once=True)
                    await connection.ask(
                        "release", directory=connection.directory, owner=self._job.owner
                    )
        self._job.close()

    async def _doze(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._raise_if_cancelled()
            await asyncio.sleep(0.1)

    def _raise_if_cancelled(self) -> None:
        if self._job.attempt.cancel_path.exists() and not self._may_have_begun:
            raise RunCancelled("it was cancelled before it ran.")

    def _wait(self, message: str) -> None:
        self._tell(JobStatus(State.PENDING, message=message, source="ssh", news=message))
