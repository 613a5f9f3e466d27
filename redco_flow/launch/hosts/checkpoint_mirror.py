"""Bring a stage's checkpoints to the launcher's workspace as the host commits them.

A checkpoint that the host deletes while it is copied is given up; those that it has deleted are
deleted here too, once a newer one is here.
"""

from __future__ import annotations

import asyncio
import contextlib

from redco_flow.errors import RedcoFlowError
from redco_flow.launch.hosts.file_sets import FileSet, committed_steps, forget_steps
from redco_flow.launch.hosts.session import HostSession
from redco_flow.launch.hosts.start import StartedJob


class CheckpointMirror:
    """The copies of one job's checkpoints."""

    def __init__(self, job: StartedJob) -> None:
        self._job = job
        self._steps: list[int] = []
        self._copying: asyncio.Task[None] | None = None

    @property
    def is_complete(self) -> bool:
        """Whether every checkpoint that the host last had is here."""
        return {*self._steps} <= {*committed_steps(self._job.workspace, self._job.work)}

    def mirror(self, session: HostSession, steps: list[int]) -> None:
        """Copy what is new among the host's checkpoints, in the background."""
        self._steps = steps
        if self._copying is None or self._copying.done():
            self._copying = asyncio.create_task(self._copy(session))

    async def finish(self, session: HostSession) -> None:
        """Wait until what the host last had is here, as far as the link allows."""
        if self._copying is not None:
            await self._copying
            await self._copy(session)

    async def _copy(self, session: HostSession) -> None:
        workspace = self._job.workspace
        with contextlib.suppress(RedcoFlowError, OSError):
            while missing := [
                step
                for step in self._steps
                if step not in committed_steps(workspace, self._job.work)
            ]:
                steps = self._steps
                answer = await session.ask(
                    "steps",
                    workspace=str(session.workspace.root),
                    work=self._job.work,
                    steps=missing,
                )
                sets = [FileSet.from_json(one) for one in answer["sets"]]
                await session.pull(sets, workspace)
                forget_steps(workspace, self._job.work, steps)
                if steps == self._steps:
                    return
