"""The `local:` section of a profile."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from redco_flow.launch.config import ExecutorConfig
from redco_flow.launch.host_facts import count_local_gpus


class Config(ExecutorConfig):
    """Jobs of the machine that submits them.

    Args:
        processes_per_host: 1: one process has all devices of this machine.
    """

    processes_per_host: Literal[1] = 1

    def num_gpus_of_host(self, environ: Mapping[str, str]) -> int | None:
        """Return how many GPUs this machine has for a job; None where only JAX can tell."""
        return count_local_gpus(environ)
