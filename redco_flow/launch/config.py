"""Settings that every executor's section of a profile has; an executor's `config` adds to it.

Read on login nodes to check a profile and its requests, so it imports neither submitit nor
what talks to a cluster.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from redco_flow.spec.model import Name, NonNegativeFloat, PositiveFloat, PositiveInt, StrictModel

if TYPE_CHECKING:
    from redco_flow.launch.call import JobResources


class BetweenFabrics(StrictModel):
    """The link between hosts of different fabrics, of a stage that has some of each.

    Args:
        gb_s: GB/s that one host sends to hosts of other fabrics, one way.
        latency_us: microseconds until a message's first byte is there.
    """

    gb_s: PositiveFloat
    latency_us: NonNegativeFloat = 30.0


class ExecutorConfig(StrictModel):
    """One executor's section of a profile.

    Args:
        processes_per_host: for stages that run on several processes; one for each GPU, or one.
        walltime_minutes: of stages that ask for none; None is unlimited.
        gpu_type: the kind of GPUs that `plan --fit` computes for, as h100 or a100-40g.
    """

    runs_arrays: ClassVar[bool] = False
    """Whether a stage that is cut into shards becomes a job array; else one job does all shards."""

    runs_groups: ClassVar[bool] = False
    """Whether stages of one group share a job; else each has its own, which needs no queue."""

    gives_requested_gpus: ClassVar[bool] = False
    """Whether a job sees the GPUs that it asks for and no others of its hosts."""

    drives_runs: ClassVar[bool] = False
    """Whether a job can be the process that drives a run (`launcher:` of a profile); then a method
    `for_launcher` returns that job's section and resources."""

    tells_starts: ClassVar[bool] = False
    """Whether the cluster says when a job would start (`CallExecutor.expected_start`)."""

    processes_per_host: PositiveInt = 1
    walltime_minutes: PositiveInt | None = None
    gpu_type: Name | None = None

    def check(self) -> None:
        """Raise where a profile with this executor lacks something in the section.

        Raises:
            ValueError: says what it lacks.
        """

    def check_installed(self) -> None:
        """Raise where a library or program that jobs are submitted with is not on this machine.

        Raises:
            UsageError: says which, and how it is installed.
        """

    def check_fits(self, resources: JobResources) -> None:
        """Raise where no job can ever get these resources.

        Raises:
            DoesNotFit: says why, and what to change.
        """

    def compare_with_site(
        self, resources: JobResources, environ: Mapping[str, str]
    ) -> tuple[list[tuple[tuple[str, ...], str]], list[str]]:
        """Compare a stage's request with the limits of the cluster's site.

        Args:
            environ: of the commands that show the limits.

        Returns:
            what the site never allows, each with the stage's setting; and notes.
        """
        return [], []

    def num_gpus_of_host(self, environ: Mapping[str, str]) -> int | None:
        """Return how many GPUs each host has for a job; None where only the cluster knows.

        Args:
            environ: of a job's processes.
        """
        return None

    def fabrics_of(self, resources: JobResources) -> tuple[list[int], BetweenFabrics] | None:
        """Return how many hosts a stage has of each fabric, in the order of ranks, and their link.

        None: all its hosts are of one fabric.
        """
        return None

    @property
    def seconds_of_warning(self) -> int:
        """Seconds between the warning of a job and the end of its walltime."""
        return 0
