"""Bring a published result from a host into the launcher's workspace, artifacts first."""

from __future__ import annotations

from redco_flow.launch.hosts.file_sets import FileSet
from redco_flow.launch.hosts.session import HostSession
from redco_flow.launch.hosts.start import StartedJob
from redco_flow.tracking.results import StageResult, publish_result


async def collect_result(session: HostSession, job: StartedJob) -> bool:
    """Copy the result of the job's fingerprint; return whether the host has one.

    Raises:
        HostUnreachable, HostRefused, ArtifactError, OSError: what is here by then is kept.
    """
    offered = await session.ask(
        "offer", workspace=str(session.workspace.root), fingerprint=job.call.fingerprint
    )
    if offered["result"] is None:
        return False
    await session.pull([FileSet.from_json(one) for one in offered["sets"]], job.workspace)
    publish_result(job.workspace, StageResult(**offered["result"]))
    return True
