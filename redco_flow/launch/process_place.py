"""Which of a job's processes this one is, carried from supervisor to worker in the environment.

Knows the variables of Slurm and our own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

_PREFIX = "REDCO_FLOW_"


@dataclass(frozen=True)
class ProcessPlace:
    """One process among those of its job.

    Args:
        rank: from 0, over all hosts.
        num_processes: of the job.
        local_rank: from 0, on this host.
        processes_per_host: on this host.
        gpus_per_host: what all processes of this host share; 0 for none.
        restart: how often the cluster has started this job anew.
        rendezvous_seconds: how long to wait for the others.
        shares_disk: 1 if all processes see the workspace, 0 if each host has its own.
    """

    rank: int = 0
    num_processes: int = 1
    local_rank: int = 0
    processes_per_host: int = 1
    gpus_per_host: int = 0
    restart: int = 0
    rendezvous_seconds: int = 300
    shares_disk: int = 1

    @classmethod
    def from_slurm(
        cls, environ: Mapping[str, str], *, gpus_per_host: int, rendezvous_seconds: int
    ) -> ProcessPlace:
        """Read what srun says.

        Raises:
            KeyError: this is no task of srun's.
        """
        num_processes = int(environ["SLURM_NTASKS"])
        return cls(
            rank=int(environ["SLURM_PROCID"]),
            num_processes=num_processes,
            local_rank=int(environ["SLURM_LOCALID"]),
            processes_per_host=num_processes // int(environ["SLURM_NNODES"]),
            gpus_per_host=gpus_per_host,
            restart=int(environ.get("SLURM_RESTART_COUNT", "0")),
            rendezvous_seconds=rendezvous_seconds,
        )

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> ProcessPlace:
        """Read what the supervisor set; a process on its own where it set nothing."""
        names = [field.name for field in fields(cls)]
        given = {name: environ.get(_PREFIX + name.upper()) for name in names}
        return cls(**{name: int(value) for name, value in given.items() if value is not None})

    def to_environment(self) -> dict[str, str]:
        """Return the variables that `from_environment` reads."""
        names = [field.name for field in fields(self)]
        return {_PREFIX + name.upper(): str(getattr(self, name)) for name in names}

    @property
    def local_device_ids(self) -> list[int] | None:
        """The host's GPUs that are this process's; None: every device that JAX finds.

        Raises:
            ValueError: the processes cannot share them evenly.
        """
        if self.gpus_per_host == 0:
            return None
        share, rest = divmod(self.gpus_per_host, self.processes_per_host)
        if rest or not share:
            raise ValueError(
                f"{self.processes_per_host} processes per host cannot share {self.gpus_per_host} "
                f"GPUs evenly; let processes_per_host divide gpus_per_host."
            )
        return list(range(self.local_rank * share, (self.local_rank + 1) * share))
