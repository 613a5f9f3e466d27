"""One stage attempt as XManager's local backend gets it: a work unit with a job for each process.

Pure: from an attempt and its resources to the jobs' arguments and variables, which are both shown
by `plan --render` and submitted. Knows XManager's words, not its library.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from redco_flow.errors import DoesNotFit
from redco_flow.launch.call import JobResources
from redco_flow.launch.processes import ProcessPlace


@dataclass(frozen=True)
class WorkUnit:
    """What one stage attempt runs.

    Args:
        attempt: its directory, absolute.
        experiment: the title of the run's experiment.
        rendezvous_seconds: how long the ranks wait for each other.
        stall_seconds, grace_seconds: as the executor has them.

    Raises:
        DoesNotFit: it asks for more than one host.
    """

    attempt: Path
    experiment: str
    resources: JobResources
    rendezvous_seconds: int
    stall_seconds: float
    grace_seconds: float

    def __post_init__(self) -> None:
        check_fits(self.resources)

    @property
    def places(self) -> list[ProcessPlace]:
        """The ranks, ascending."""
        num_processes = self.resources.num_processes
        return [
            ProcessPlace(
                rank=rank,
                num_processes=num_processes,
                local_rank=rank,
                processes_per_host=num_processes,
                gpus_per_host=self.resources.gpus_per_host,
                rendezvous_seconds=self.rendezvous_seconds,
            )
            for rank in range(num_processes)
        ]

    @property
    def arguments(self) -> list[str]:
        """What Python gets in every job; which rank a job is stands in its variables."""
        walltime = self.resources.walltime_minutes
        return [
            *("-P", "-m", "redco_flow.launch.xmanager.follow", str(self.attempt)),
            *("--stall-seconds", f"{self.stall_seconds:g}"),
            *("--grace-seconds", f"{self.grace_seconds:g}"),
            *([] if walltime is None else ["--walltime-seconds", str(walltime * 60)]),
        ]


def check_fits(resources: JobResources) -> None:
    """Raise unless this machine alone is enough.

    Raises:
        DoesNotFit: it is not.
    """
    if resources.num_hosts > 1:
        raise DoesNotFit(
            f"the stage asks for {resources.num_hosts} hosts (resources.num_hosts), and XManager's "
            f"local backend has one, this machine: set it to 1, and xmanager.processes_per_host "
            f"to the number of processes."
        )


def render(unit: WorkUnit, title: str, variables: Mapping[str, str]) -> str:
    """Return the work unit as text.

    Args:
        variables: the profile's environment.
    """
    return "\n".join(_lines(unit, title, variables)) + "\n"


def _lines(unit: WorkUnit, title: str, variables: Mapping[str, str]) -> Iterator[str]:
    yield f"# redco-flow: {' '.join(title.split())}"
    yield f"experiment {unit.experiment}, one work unit, backend local"
    for place in unit.places:
        yield f"job rank{place.rank}: {shlex.join(['python', *unit.arguments])}"
        yield from (f"  {name}={value}" for name, value in place.to_environment().items())
    yield from (f"{name}={shlex.quote(value)}" for name, value in variables.items())
