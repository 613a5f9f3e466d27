"""Ask a Slurm cluster what it has, and its nodes what they see, without waiting in a queue."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from redco_flow.errors import StageFailed
from redco_flow.launch.job_environment import job_environment
from redco_flow.launch.rank import WARNING_SIGNAL
from redco_flow.launch.slurm import commands as slurm_commands
from redco_flow.launch.slurm.node_probe import LISTENING
from redco_flow.launch.slurm.script import gpu_option, selection_options
from redco_flow.spec.slurm_section import SlurmSection
from redco_flow.tracking.attempt import AttemptDirectory

SIGNALS = (WARNING_SIGNAL, "TERM")
"""What a job of ours must hear: the warning before the end of its time, and a request to stop."""

_SECONDS_FOR_NODES = 10.0
_SECONDS_BETWEEN_LOOKS = 0.1


def list_partitions(environment: Mapping[str, str]) -> dict[str, int]:
    """Return the number of nodes of each partition.

    Raises:
        ClusterUnreachable, StageFailed: Slurm does not answer.
    """
    return slurm_commands.list_partitions(environment)


def count_gpus(settings: SlurmSection, environment: Mapping[str, str]) -> dict[str, int]:
    """Return how many GPUs Slurm has for each node of the profile's partition.

    Raises:
        ClusterUnreachable, StageFailed: Slurm does not answer.
    """
    return slurm_commands.count_gpus(settings.partition, environment)


def try_submission(settings: SlurmSection, environment: Mapping[str, str]) -> None:
    """Have Slurm judge the profile's partition, account and limits; nothing is submitted.

    Raises:
        StageFailed: Slurm refuses them; has Slurm's words.
        ClusterUnreachable: there is no answer.
    """
    slurm_commands.try_submission([*selection_options(settings), *settings.options], environment)


def probe_nodes(
    settings: SlurmSection,
    folder: Path,
    environment: Mapping[str, str],
    num_nodes: int,
    gpus_per_host: int,
) -> list[dict[str, Any]]:
    """Return what `node_probe` found on each of some nodes.

    Args:
        folder: in the workspace; holds `mark`.
        gpus_per_host: what the job asks for, as the profile's stages would.

    Raises:
        ClusterUnreachable, StageFailed: no node could be had at once, or it runs no Python.
    """
    gpus = [gpu_option(settings, gpus_per_host)] if gpus_per_host else []
    options = [f"--nodes={num_nodes}", "--ntasks-per-node=1", *gpus, *selection_options(settings)]
    python = [*settings.container, settings.python or sys.executable, "-P"]
    command = [*python, "-m", "redco_flow.launch.slurm.node_probe", str(folder), *SIGNALS]
    own = job_environment(environment, AttemptDirectory(folder))
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(slurm_commands.run_on_nodes, options, command, own, _SECONDS_FOR_NODES)
        _send_signals(folder, num_nodes, asked, environment)
        said = asked.result()
    answers = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    if not answers:
        raise StageFailed(f"the nodes answered nothing but {said.strip()!r}.")
    return sorted(answers, key=lambda one: str(one["node"]))


def _send_signals(
    folder: Path, num_nodes: int, asked: Future[str], environment: Mapping[str, str]
) -> None:
    """Once every node listens, send what a cluster sends, the way it comes."""
    while not asked.done():
        listening = list(folder.glob(f"{LISTENING}*"))
        if len(listening) == num_nodes:
            for name in SIGNALS:
                slurm_commands.send_signal(listening[0].read_text(), name, environment)
            return
        time.sleep(_SECONDS_BETWEEN_LOOKS)
