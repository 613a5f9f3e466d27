"""What a rank's process is told when it runs in a container: its command and its variables.

The same for Kubernetes, Vertex AI and Docker; which rank a container is, each says in its own way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from redco_flow.launch.call import JobResources
from redco_flow.launch.process_place import ProcessPlace
from redco_flow.launch.process_tree import ATTEMPT_VARIABLE
from redco_flow.spec.xmanager_section import XManagerSection


@dataclass(frozen=True)
class ContainerJob:
    """What one stage attempt is to run in containers.

    Args:
        attempt, workspace: absolute; every container sees the workspace at its path.
        title: run, stage and attempt.
        variables: the profile's environment; no secrets.
    """

    attempt: Path
    workspace: Path
    title: str
    resources: JobResources
    settings: XManagerSection
    variables: Mapping[str, str]
    stall_seconds: float
    grace_seconds: float


def rank_command(job: ContainerJob, module: str) -> list[str]:
    """Return the arguments of the container's Python.

    Args:
        module: of this package: the program that a container runs.
    """
    walltime = job.resources.walltime_minutes
    return [
        *("-P", "-m", f"redco_flow.launch.xmanager.{module}", str(job.attempt)),
        *("--stall-seconds", f"{job.stall_seconds:g}"),
        *("--grace-seconds", f"{job.grace_seconds:g}"),
        *([] if walltime is None else ["--walltime-seconds", str(walltime * 60)]),
    ]


def shared_variables(job: ContainerJob, place: ProcessPlace) -> dict[str, str]:
    """Return the variables that are the same in every container: all but the rank.

    Args:
        place: of any of them.
    """
    own = place.to_environment()
    del own["REDCO_FLOW_RANK"]
    return {**job.variables, **own, ATTEMPT_VARIABLE: str(job.attempt)}
