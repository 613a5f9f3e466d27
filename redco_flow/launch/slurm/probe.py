"""Ask a Slurm cluster what it has, and its nodes what they see, without waiting in a queue."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from redco_flow.errors import StageFailed
from redco_flow.launch.executor import job_environment
from redco_flow.launch.host_facts import num_gpus, own_name_problem, package_versions
from redco_flow.launch.processes import RankInfo
from redco_flow.launch.rank import WARNING_SIGNAL
from redco_flow.launch.rendezvous import CannotMeet, Rendezvous
from redco_flow.launch.shared_files import (
    FileWatch,
    SharedTrial,
    flock_held,
    try_flock,
    write_files,
)
from redco_flow.launch.slurm import queue
from redco_flow.launch.slurm.config import Config
from redco_flow.launch.slurm.script import gpu_option, selection_options
from redco_flow.records import write_text
from redco_flow.tracking.attempt import AttemptDirectory

_NODE_LOCK = "lock-of-node"
_HOST_NAME = "host-"  # with a rank; has the host's own name

_SECONDS_TO_MEET = 8.0
_SECONDS_TO_HEAR = 6.0


def main(arguments: list[str]) -> int:
    """Look around and print what was found."""
    now = time.time()
    folder, login_lock, names = Path(arguments[0]), Path(arguments[1]), arguments[2:]
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
        **_files(folder, login_lock, rank_info.rank),
        "unreached": "",
        "unknown_names": [],
    }
    holds_lock: AbstractContextManager[None] = nullcontext()
    if rank_info.rank == 0 and not found["problem"]:
        holds_lock = flock_held(folder / _NODE_LOCK)
    with holds_lock:
        if not found["problem"] and rank_info.num_processes > 1:
            found["unreached"] = _meet(folder, rank_info)
            found["unknown_names"] = _unknown_names(folder)
            if rank_info.rank and not found["unreached"]:  # rank 0 has had its lock before
                found["flock"] = found["flock"] or try_flock(folder / _NODE_LOCK)
        if not found["problem"]:
            _report({"rank": rank_info.rank, "listens": os.environ["SLURM_JOB_ID"]})
            _listen(heard, names)
    _report(found | {"heard": sorted(heard)})
    return 0


def _report(record: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(record) + "\n")
    sys.stdout.flush()


def _files(folder: Path, login_lock: Path, rank: int) -> dict[str, str]:
    try:
        read = (folder / "mark").read_text()
        write_text(folder / f"{_HOST_NAME}{rank}", socket.gethostname())
        write_files(folder, str(rank))
        _report({"rank": rank, "has_written": True})
        flock = try_flock(login_lock)
    except OSError as error:
        return {"read": "", "problem": str(error), "flock": ""}
    return {"read": read, "problem": "", "flock": flock}


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
    for name in sorted({path.read_text() for path in folder.glob(f"{_HOST_NAME}*")}):
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
    trial: SharedTrial,
    environment: Mapping[str, str],
    num_nodes: int,
    gpus_per_host: int,
) -> list[dict[str, Any]]:
    """Return what `main` found on each of some nodes.

    Args:
        trial: of the workspace; its folder holds `mark`.
        gpus_per_host: what the job asks for, as the profile's stages would.

    Raises:
        ClusterUnreachable, StageFailed: no node could be had at once, or it runs no Python.
    """
    gpus = [gpu_option(settings, gpus_per_host)] if gpus_per_host else []
    options = [f"--nodes={num_nodes}", "--ntasks-per-node=1", *gpus, *selection_options(settings)]
    python = [*settings.container, settings.python or sys.executable, "-P"]
    arguments = [str(trial.folder), str(trial.lock), *SIGNALS]
    command = [*python, "-m", "redco_flow.launch.slurm.probe", *arguments]
    own = job_environment(environment, AttemptDirectory(trial.folder))
    # On this machine's own disk: how late the nodes' files are is compared with when they report.
    with tempfile.NamedTemporaryFile("w+") as output, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(queue.run_on_nodes, options, command, own, _SECONDS_FOR_NODES, output)
        _answer_reports(Path(output.name), num_nodes, asked, environment, trial.watch)
        asked.result()
        reports = _reports_in(Path(output.name))
        said = Path(output.name).read_text(errors="replace")
    trial.watch.wait()
    answers = [one for one in reports if "node" in one]
    if not answers:
        raise StageFailed(f"the nodes answered nothing but {said.strip()!r}.")
    return sorted(answers, key=lambda one: str(one["node"]))


def _answer_reports(
    output: Path,
    num_nodes: int,
    asked: Future[None],
    environment: Mapping[str, str],
    watch: FileWatch,
) -> None:
    """Once every node listens, send what a cluster sends, the way it comes; watch their files."""
    are_signals_sent = is_last = False
    while not is_last:
        is_last = asked.done()
        reports = _reports_in(output)
        for report in reports:
            if "has_written" in report:
                watch.note_written(str(report["rank"]))
        watch.look()
        listening = [report["listens"] for report in reports if "listens" in report]
        if len(listening) == num_nodes and not (are_signals_sent or is_last):
            are_signals_sent = True
            for name in SIGNALS:
                queue.send_signal(listening[0], name, environment)
        time.sleep(_SECONDS_BETWEEN_LOOKS)


def _reports_in(output: Path) -> list[dict[str, Any]]:
    lines = output.read_text(errors="replace").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}\n")]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
