"""One stage attempt as XManager's local backend gets it: a work unit with a job for each process.

Pure: from an attempt and its resources to the jobs' arguments and variables, which are both shown
by `plan --render` and submitted. Knows XManager's words, not its library.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from redco_flow.launch.call import JobResources
from redco_flow.launch.processes import RankInfo


@dataclass(frozen=True)
class WorkUnit:
    """The work unit of one stage attempt: a job for each of its ranks.

    Args:
        attempt: its directory, absolute.
        experiment: the title of the run's experiment.
        rendezvous_seconds: how long the ranks wait for each other.
        stall_seconds, grace_seconds: as the executor has them.
    """

    attempt: Path
    experiment: str
    resources: JobResources
    rendezvous_seconds: int
    stall_seconds: float
    grace_seconds: float

    @property
    def rank_infos(self) -> list[RankInfo]:
        """The ranks, ascending."""
        num_processes = self.resources.num_processes
        return [
            RankInfo(
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
        """Arguments of Python in every job; the rank is in its environment variables."""
        walltime = self.resources.walltime_minutes
        return [
            *("-P", "-m", "redco_flow.launch.xmanager.follow", str(self.attempt)),
            *("--stall-seconds", f"{self.stall_seconds:g}"),
            *("--grace-seconds", f"{self.grace_seconds:g}"),
            *([] if walltime is None else ["--walltime-seconds", str(walltime * 60)]),
        ]


def render(unit: WorkUnit, title: str, variables: Mapping[str, str]) -> str:
    """Return the work unit as text.

    Args:
        variables: the profile's environment.
    """
    return "\n".join(_lines(unit, title, variables)) + "\n"


def _lines(unit: WorkUnit, title: str, variables: Mapping[str, str]) -> Iterator[str]:
    yield f"# redco-flow: {' '.join(title.split())}"
    yield f"experiment {unit.experiment}, one work unit, backend local"
    for rank_info in unit.rank_infos:
        yield f"job rank{rank_info.rank}: {shlex.join(['python', *unit.arguments])}"
        yield from (f"  {name}={value}" for name, value in rank_info.to_environment().items())
    yield from (f"{name}={shlex.quote(value)}" for name, value in variables.items())
