"""Ask a Slurm cluster what it has, and its nodes what they see, without waiting in a queue."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from redco_flow.errors import StageFailed
from redco_flow.launch.job_environment import job_environment
from redco_flow.launch.slurm import commands as slurm_commands
from redco_flow.launch.slurm.script import selection_options
from redco_flow.spec.slurm_section import SlurmSection
from redco_flow.tracking.attempt import AttemptDirectory

_SECONDS_FOR_NODES = 10.0


def list_partitions(environment: Mapping[str, str]) -> dict[str, int]:
    """Return the number of nodes of each partition.

    Raises:
        ClusterUnreachable, StageFailed: Slurm does not answer.
    """
    return slurm_commands.list_partitions(environment)


def probe_nodes(
    settings: SlurmSection, folder: Path, environment: Mapping[str, str], num_nodes: int
) -> list[dict[str, Any]]:
    """Return what `node_probe` found on each of some nodes.

    Args:
        folder: in the workspace; holds `mark`.

    Raises:
        ClusterUnreachable, StageFailed: no node could be had at once, or it runs no Python.
    """
    python = [*settings.container, settings.python or sys.executable, "-P"]
    said = slurm_commands.run_on_nodes(
        [f"--nodes={num_nodes}", "--ntasks-per-node=1", *selection_options(settings)],
        [*python, "-m", "redco_flow.launch.slurm.node_probe", str(folder)],
        job_environment(environment, AttemptDirectory(folder)),
        _SECONDS_FOR_NODES,
    )
    answers = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    if not answers:
        raise StageFailed(f"the nodes answered nothing but {said.strip()!r}.")
    return sorted(answers, key=lambda one: str(one["node"]))
