"""The `local:` section of a profile."""

from __future__ import annotations

from typing import Literal

from redco_flow.launch.config import ExecutorConfig


class Config(ExecutorConfig):
    """Jobs of the machine that submits them.

    Args:
        processes_per_host: 1: one process has all devices of this machine.
        walltime_minutes: of stages that ask for none; None is unlimited.
    """

    processes_per_host: Literal[1] = 1
