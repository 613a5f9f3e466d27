"""Ask a Slurm cluster what it has, and its nodes what they see, without waiting in a queue."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from redco_flow.errors import StageFailed
from redco_flow.launch.executor import job_environment
from redco_flow.launch.host_facts import num_gpus, own_name_problem, package_versions
from redco_flow.launch.processes import RankInfo
from redco_flow.launch.rank import WARNING_SIGNAL
from redco_flow.launch.rendezvous import CannotMeet, Rendezvous
from redco_flow.launch.slurm import queue
from redco_flow.launch.slurm.config import Config
from redco_flow.launch.slurm.script import gpu_option, selection_options
from redco_flow.records import write_text
from redco_flow.tracking.attempt import AttemptDirectory

LISTENING = "listening-"
"""A node's file of this name, with its rank, says that it waits for signals; has the job's id."""

WRITTEN = "written-by-"
"""A node's file of this name, with its rank; has the host's own name."""

_SECONDS_TO_MEET = 8.0
_SECONDS_TO_HEAR = 6.0


def main(arguments: list[str]) -> int:
    """Look around and print what was found."""
    now = time.time()
    folder, names = Path(arguments[0]), arguments[1:]
    heard: set[str] = set()
    for name in names:
        signal.signal(signal.Signals[f"SIG{name}"], lambda *_, name=name: heard.add(name))
    rank_info = RankInfo.from_slurm(os.environ, gpus_per_host=0, rendezvous_seconds=0)
    found: dict[str, Any] = {
        "node": os.environ.get("SLURMD_NODENAME", os.uname().nodename),
        "host": socket.gethostname(),
        "rank": rank_info.rank,
        "time": now,
        "versions": package_versions(),
        "gpus": num_gpus(),
        "own_name": own_name_problem(),
        **_files(folder, rank_info.rank),
        "unreached": "",
        "unknown_names": [],
    }
    if not found["problem"] and rank_info.num_processes > 1:
        found["unreached"] = _meet(folder, rank_info)
        found["unknown_names"] = _unknown_names(folder)
    if not found["problem"]:
        write_text(folder / f"{LISTENING}{rank_info.rank}", os.environ["SLURM_JOB_ID"])
        _listen(heard, names)
    sys.stdout.write(json.dumps(found | {"heard": sorted(heard)}) + "\n")
    return 0


def _files(folder: Path, rank: int) -> dict[str, str]:
    try:
        read = (folder / "mark").read_text()
        write_text(folder / f"{WRITTEN}{rank}", socket.gethostname())
    except OSError as error:
        return {"read": "", "problem": str(error)}
    return {"read": read, "problem": ""}


def _meet(folder: Path, rank_info: RankInfo) -> str:
    """Meet the other nodes' processes; return "" or why that failed."""
    try:
        Rendezvous(folder, rank_info, {}, _SECONDS_TO_MEET).meet()
    except CannotMeet as error:
        return str(error)
    return ""


def _unknown_names(folder: Path) -> list[str]:
    """The names that hosts call themselves by and that do not resolve here."""
    found = []
    for name in sorted({path.read_text() for path in folder.glob(f"{WRITTEN}*")}):
        try:
            socket.getaddrinfo(name, None)
        except OSError:
            found.append(name)
    return found


def _listen(heard: set[str], names: Sequence[str]) -> None:
    deadline = time.monotonic() + _SECONDS_TO_HEAR
    while len(heard) < len(names) and time.monotonic() < deadline:
        time.sleep(0.05)


SIGNALS = (WARNING_SIGNAL, "TERM")
"""What a job of ours must hear: the warning before the end of its time, and a request to stop."""

_SECONDS_FOR_NODES = 10.0
_SECONDS_BETWEEN_LOOKS = 0.1


def list_partitions(environment: Mapping[str, str]) -> dict[str, int]:
    """Return the number of nodes of each partition.

    Raises:
        ClusterUnreachable, StageFailed: Slurm does not answer.
    """
    return queue.list_partitions(environment)


def count_gpus(settings: Config, environment: Mapping[str, str]) -> dict[str, int]:
    """Return how many GPUs Slurm has for each node of the profile's partition.

    Raises:
        ClusterUnreachable, StageFailed: Slurm does not answer.
    """
    return queue.count_gpus(settings.partition, environment)


def try_submission(settings: Config, environment: Mapping[str, str]) -> None:
    """Have Slurm judge the profile's partition, account and limits; nothing is submitted.

    Raises:
        StageFailed: Slurm refuses them; has Slurm's words.
        ClusterUnreachable: there is no answer.
    """
    queue.try_submission([*selection_options(settings), *settings.options], environment)


def probe_nodes(
    settings: Config,
    folder: Path,
    environment: Mapping[str, str],
    num_nodes: int,
    gpus_per_host: int,
) -> list[dict[str, Any]]:
    """Return what `main` printed on each of some nodes, as JSON.

    Args:
        folder: in the workspace; holds `mark`.
        gpus_per_host: what the job asks for, as the profile's stages would.

    Raises:
        ClusterUnreachable, StageFailed: no node could be had at once, or it runs no Python.
    """
    gpus = [gpu_option(settings, gpus_per_host)] if gpus_per_host else []
    options = [f"--nodes={num_nodes}", "--ntasks-per-node=1", *gpus, *selection_options(settings)]
    python = [*settings.container, settings.python or sys.executable, "-P"]
    command = [*python, "-m", "redco_flow.launch.slurm.probe", str(folder), *SIGNALS]
    own = job_environment(environment, AttemptDirectory(folder))
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(queue.run_on_nodes, options, command, own, _SECONDS_FOR_NODES)
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
                queue.send_signal(listening[0].read_text(), name, environment)
            return
        time.sleep(_SECONDS_BETWEEN_LOOKS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
