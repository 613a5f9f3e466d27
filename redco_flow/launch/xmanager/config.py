"""The `xmanager:` section of a profile, and whether the library is here, without importing it."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal

from redco_flow.errors import DoesNotFit, UsageError
from redco_flow.launch.config import ExecutorConfig
from redco_flow.launch.host_facts import count_local_gpus
from redco_flow.spec.model import PositiveInt

if TYPE_CHECKING:
    from redco_flow.launch.call import JobResources

INSTALL = "uv pip install 'redco-flow[xmanager]'"
"""Not pip: its resolver does not come to an end with what XManager needs."""


def require_xmanager() -> None:
    """Raise unless jobs can be submitted.

    Raises:
        UsageError: the library is not installed; says what to do.
    """
    if find_spec("xmanager") is None:
        raise UsageError(
            f"executor 'xmanager' needs the library xmanager, which is not installed here; "
            f"install it with: {INSTALL}"
        )


class Config(ExecutorConfig):
    """One backend of XManager.

    Args:
        backend: local runs the jobs on this machine.
        rendezvous_seconds: how long the ranks of a job wait for each other at its start.
    """

    backend: Literal["local"] = "local"
    rendezvous_seconds: PositiveInt = 300

    def check_installed(self) -> None:
        """Raise where the library is not installed.

        Raises:
            UsageError: says what to do.
        """
        require_xmanager()

    def check_fits(self, resources: JobResources) -> None:
        """Raise unless this machine alone is enough.

        Raises:
            DoesNotFit: it is not.
        """
        if resources.num_hosts > 1:
            raise DoesNotFit(
                f"the stage asks for {resources.num_hosts} hosts (resources.num_hosts), and "
                f"XManager's local backend has one, this machine: set it to 1, and "
                f"xmanager.processes_per_host to the number of processes."
            )

    def num_gpus_of_host(self, environ: Mapping[str, str]) -> int | None:
        """Return how many GPUs this machine has for a job; None where only JAX can tell."""
        return count_local_gpus(environ)
