"""Ask a Slurm cluster what it has, and its nodes, by a short job, what they see."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from redco_flow.errors import ClusterUnreachable, StageFailed
from redco_flow.launch.call import JobResources
from redco_flow.launch.host_facts import num_gpus, own_name_problem, package_versions
from redco_flow.launch.node_disk import look_at_node_disk
from redco_flow.launch.processes import WARNING_SIGNAL, RankInfo
from redco_flow.launch.rendezvous import CannotMeet, Rendezvous
from redco_flow.launch.shared_files import SharedTrial, flock_held, try_flock, write_files
from redco_flow.launch.slurm import queue
from redco_flow.launch.slurm.config import Config
from redco_flow.launch.slurm.script import JOB_LOG, Submission, render_probe, selection_options
from redco_flow.launch.slurm.states import WAITING, is_terminal
from redco_flow.records import SECONDS_TO_SEE_RECORDS, list_directory, write_text
from redco_flow.tracking.attempt import AttemptDirectory

_NODE_LOCK = "lock-of-node"
_HOST_NAME = "host-"  # with a rank; has the host's own name

_SECONDS_TO_MEET = 8.0
_SECONDS_TO_HEAR = 60.0  # the nodes' reports, by which signals are sent, may be visible late
_SECONDS_TO_HEAR_THE_REST = 3.0


def main(arguments: list[str]) -> int:
    """Look around and print what was found."""
    now = time.time()
    folder, login_lock = Path(arguments[0]), Path(arguments[1])
    node_directory, names = arguments[2] or None, arguments[3:]
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
        "node_disk": look_at_node_disk(node_directory, os.environ),
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
        _report({"rank": rank, "has_written": time.time()})
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
    """Wait for signals; they come in this order."""
    deadline = time.monotonic() + _SECONDS_TO_HEAR
    while len(heard) < len(names) and time.monotonic() < deadline:
        if names[-1] in heard:
            deadline = min(deadline, time.monotonic() + _SECONDS_TO_HEAR_THE_REST)
        time.sleep(0.05)


SIGNALS = (WARNING_SIGNAL, "TERM")
"""What a job of ours must hear: the warning before the end of its time, and a request to stop."""

_MINUTES_ON_NODES = 5
_SECONDS_BETWEEN_LOOKS = 0.1
_SECONDS_BETWEEN_REQUESTS = 2.0


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
    options = [word for option in settings.options for word in shlex.split(option)]
    queue.try_submission([*selection_options(settings), *options], environment)


MakeJob = Callable[[AttemptDirectory, str, JobResources], tuple[Submission, Mapping[str, str]]]
"""Makes a job for a directory, title and resources: its settings, and sbatch's environment."""


def probe_nodes(
    make_job: MakeJob,
    trial: SharedTrial,
    num_nodes: int,
    gpus_per_host: int,
    node_directory: str | None,
) -> tuple[list[dict[str, Any]], float]:
    """Return what `main` found on each of some nodes, and when the job had not started yet.

    Args:
        trial: of the workspace; its folder holds `mark`.
        gpus_per_host: what the job asks for, as the profile's stages would.
        node_directory: the profile's `staging.directory`.

    Raises:
        ClusterUnreachable, StageFailed: the job waits for too long, or runs no Python.
    """
    resources = JobResources(num_hosts=num_nodes, gpus_per_host=gpus_per_host)
    submission, environment = make_job(AttemptDirectory(trial.folder), "doctor", resources)
    minutes = _MINUTES_ON_NODES + math.ceil(submission.settings.warning_seconds / 60)
    submission = replace(submission, resources=replace(resources, walltime_minutes=minutes))
    arguments = [str(trial.folder), str(trial.lock), node_directory or "", *SIGNALS]
    script = trial.folder / "job.sh"
    write_text(script, render_probe(submission, "redco_flow.launch.slurm.probe", arguments))
    (trial.folder / JOB_LOG).parent.mkdir()
    seconds = submission.settings.doctor_wait_seconds
    visit = _Visit(queue.submit(script, environment), trial, num_nodes, environment, seconds)
    try:
        visit.follow()
    finally:
        with suppress(ClusterUnreachable, StageFailed):
            queue.cancel(visit.job_id, submission.job_name, environment)
    trial.watch.wait()
    answers = visit.reports_with("node")
    if not answers:
        raise StageFailed(
            f"job {visit.job_id} ended ({visit.state or 'unknown to Slurm'}), and its log, which "
            f"the nodes write in the workspace, has no answer but {visit.log.strip()!r}."
        )
    return sorted(answers, key=lambda one: str(one["node"])), visit.waited_at


@dataclass
class _Visit:
    """The job on the nodes, followed by its log and the queue.

    Args:
        seconds_in_queue: longer than this it does not wait.
        waited_at: when it was last known not to have started.
        state: in Slurm's words; "" where Slurm does not show the job any more.
    """

    job_id: str
    trial: SharedTrial
    num_nodes: int
    environment: Mapping[str, str]
    seconds_in_queue: int
    waited_at: float = field(default_factory=time.time)
    state: str = "PENDING"
    has_ended: bool = False
    log: str = ""

    def follow(self) -> None:
        """Until the nodes have answered, or cannot: watch their files, send what a cluster sends.

        Raises:
            StageFailed: the job waits in the queue for too long.
        """
        submitted_at, asked_at = time.monotonic(), float("-inf")
        deadline = float("inf")
        are_signals_sent = False
        while len(self.reports_with("node")) < self.num_nodes and time.monotonic() < deadline:
            if time.monotonic() - asked_at > _SECONDS_BETWEEN_REQUESTS:
                asked_at = time.monotonic()
                self._ask_slurm(asked_at - submitted_at)
            latest = time.monotonic() + self._seconds_to_see_log()
            deadline = min(deadline, latest) if self.has_ended else float("inf")
            self._read_log()
            listening = self.reports_with("listens")
            silent = [one for one in self.reports_with("node") if one["problem"]]
            if len(listening) + len(silent) == self.num_nodes and not are_signals_sent:
                are_signals_sent = True
                for name in SIGNALS if listening else ():
                    queue.send_signal(self.job_id, name, self.environment)
            time.sleep(_SECONDS_BETWEEN_LOOKS)

    def reports_with(self, key: str) -> list[dict[str, Any]]:
        """The reports of the nodes that have a key."""
        lines = re.findall(r'\{".*\}$(?=\n)', self.log, re.MULTILINE)  # after srun's --label
        return [one for one in map(json.loads, lines) if key in one]

    def _read_log(self) -> None:
        self.trial.watch.look()
        list_directory(self.trial.folder / "logs")
        with suppress(OSError):
            self.log = (self.trial.folder / JOB_LOG).read_text(errors="replace")
        for report in self.reports_with("has_written"):
            ago = time.time() - report["has_written"]
            self.trial.watch.note_written(str(report["rank"]), ago)

    def _ask_slurm(self, seconds: float) -> None:
        asked_at = time.time()
        try:
            entry = queue.list_jobs(self.environment).get(self.job_id)
        except ClusterUnreachable:
            return
        self.state = entry.state if entry else ""
        self.has_ended = entry is None or is_terminal(entry)
        if entry is None or self.state not in WAITING:
            return
        self.waited_at = asked_at
        if seconds > self.seconds_in_queue:
            raise StageFailed(
                f"a job of {self.num_nodes} nodes waited {self.seconds_in_queue} s in the queue "
                f"({entry.reason or 'no reason'}); it is cancelled."
            )

    def _seconds_to_see_log(self) -> float:
        """Return how long to wait for an ended job's log; for a failed one's, not long."""
        return 2.0 if self.log and self.state != "COMPLETED" else SECONDS_TO_SEE_RECORDS


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
