"""The `xmanager:` section of a profile: which of XManager's backends gets the jobs."""

from __future__ import annotations

from typing import Literal

from redco_flow.spec.model import PositiveInt, StrictModel


class XManagerSection(StrictModel):
    """One backend of XManager.

    Args:
        backend: local runs the jobs on this machine.
        processes_per_host: for stages that run on several processes; one for each GPU, or one.
        walltime_minutes: of stages that ask for none; None is unlimited.
        rendezvous_seconds: how long the ranks of a job wait for each other at its start.
    """

    backend: Literal["local"] = "local"
    processes_per_host: PositiveInt = 1
    walltime_minutes: PositiveInt | None = None
    rendezvous_seconds: PositiveInt = 300
