"""Check a Slurm cluster by one short job on two nodes: what it sees, reaches, has and hears.

The job has the script of a stage's job, and is cancelled where it waits in the queue for too long.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redco_flow.errors import RedcoFlowError
from redco_flow.launch.host_facts import Finding, package_versions
from redco_flow.launch.node_disk import node_disk_finding
from redco_flow.launch.shared_files import FileWatch, settle_locks, shared_trial
from redco_flow.launch.slurm.config import Config
from redco_flow.launch.slurm.limits import examine_site
from redco_flow.launch.slurm.probe import (
    SIGNALS,
    MakeJob,
    count_gpus,
    list_partitions,
    probe_nodes,
    try_submission,
)
from redco_flow.tracking.workspace import Workspace

_MAX_SECONDS_OF_CLOCK_DIFFERENCE = 5.0

Answers = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Visit:
    """The replies of the nodes, and the interval in which they were given.

    Args:
        watch: of the files that the nodes wrote.
    """

    answers: Answers
    mark: str
    started_at: float
    ended_at: float
    watch: FileWatch


def examine_slurm(
    settings: Config,
    workspace: str | Path,
    gpus_per_host: int,
    make_job: MakeJob,
    node_directory: str | None,
) -> Iterator[Finding]:
    """Yield one finding per check; without answering nodes, why there are none.

    Args:
        make_job: as jobs of the profile are made.
        gpus_per_host: what the job asks for, as the profile's stages would.
        node_directory: the profile's `staging.directory`.
    """
    try:
        partitions = list_partitions(os.environ)
        gpus = count_gpus(settings, os.environ)
    except RedcoFlowError as error:
        remedy = "run it where sbatch and squeue work, with SLURM_CONF set if the site needs it"
        yield Finding("slurm", False, str(error), remedy)
        return
    known = ", ".join(sorted(partitions))
    is_there = settings.partition is None or settings.partition in partitions
    detail = settings.partition or f"the default of {known}"
    yield Finding("partition", is_there, detail, f"slurm.partition: one of {known}")
    if not is_there:
        return
    yield examine_site(os.environ, settings.partition)
    account = _check_account(settings)
    yield account
    enough = _check_gpus(gpus_per_host, gpus)
    yield enough
    if not (account.is_good and enough.is_good):
        return
    num_nodes = min(2, partitions[settings.partition] if settings.partition else 2)
    num_nodes = 1 if settings.omit_nodes else num_nodes
    seconds = settings.doctor_wait_seconds
    asked = f"asking for {num_nodes} nodes; waits up to {seconds} s in the queue"
    yield Finding("job", True, asked)
    try:
        visit = _visit(make_job, workspace, num_nodes, gpus_per_host, node_directory)
    except RedcoFlowError as error:
        remedy = (
            "mend what it says; where the job only waited, raise slurm.doctor_wait_seconds, or "
            "name a partition or QOS for short tests in a profile that extends this one"
        )
        yield Finding("nodes", False, str(error), remedy)
        return
    yield Finding("nodes", True, ", ".join(str(one["node"]) for one in visit.answers))
    yield _check_workspace(visit)
    yield visit.watch.finding()
    yield settle_locks(
        Workspace.open(workspace), {str(one["node"]): one["flock"] for one in visit.answers}
    )
    if node_directory is not None:
        yield node_disk_finding({str(one["node"]): one["node_disk"] for one in visit.answers})
    yield _check_packages(visit.answers)
    yield _check_visible_gpus(visit.answers, gpus_per_host)
    yield _check_clocks(visit)
    yield _check_names(visit.answers)
    yield _check_ports(visit.answers)
    yield _check_signals(visit.answers)


def _check_account(settings: Config) -> Finding:
    chosen = ("account", "qos", "reservation", "constraint")
    shown = ", ".join(f"{name} {value}" for name in chosen if (value := getattr(settings, name)))
    try:
        try_submission(settings, os.environ)
    except RedcoFlowError as error:
        names = ", ".join(f"slurm.{name}" for name in chosen)
        return Finding("account", False, str(error), f"correct {names} or slurm.options")
    return Finding("account", True, shown or "the default one may submit")


def _check_gpus(gpus_per_host: int, gpus: Mapping[str, int]) -> Finding:
    most = max(gpus.values(), default=0)
    num_nodes = sum(count >= max(1, gpus_per_host) for count in gpus.values())
    shown = f"{num_nodes} of {len(gpus)} nodes have {gpus_per_host or 'some'}, the most is {most}"
    return Finding(
        "gpus",
        most >= gpus_per_host,
        shown if most or gpus_per_host else "Slurm has none here",
        "lower gpus_per_host, choose another slurm.partition, or have gres.conf list the GPUs "
        "(`scontrol show node` shows them as Gres)",
    )


def _visit(
    make_job: MakeJob,
    workspace: str | Path,
    num_nodes: int,
    gpus_per_host: int,
    node_directory: str | None,
) -> Visit:
    mark = secrets.token_hex(8)
    ranks = [str(rank) for rank in range(num_nodes)]
    with shared_trial(Workspace.open(workspace), ranks) as trial:
        (trial.folder / "mark").write_text(mark)
        answers, started_at = probe_nodes(make_job, trial, num_nodes, gpus_per_host, node_directory)
        return Visit(answers, mark, started_at, time.time(), trial.watch)


def _check_workspace(visit: Visit) -> Finding:
    blind = [
        f"not seen, or not writable, on {one['node']} {one['problem']}".rstrip()
        for one in visit.answers
        if one["read"] != visit.mark or one["problem"]
    ]
    return Finding(
        "shared workspace",
        not blind,
        "; ".join(blind) or "written and read on every node",
        "put `workspace` on a file system that all nodes mount under the same path",
    )


def _check_packages(answers: Answers) -> Finding:
    here = package_versions()
    differing = sorted(
        f"{name} {one['versions'].get(name)} on {one['node']}, {version} here"
        for one in answers
        for name, version in here.items()
        if one["versions"].get(name) != version
    )
    shown = "; ".join(differing) or ", ".join(f"{name} {version}" for name, version in here.items())
    return Finding("packages on the nodes", not differing, shown, "set slurm.python or slurm.setup")


def _check_visible_gpus(answers: Answers, gpus_per_host: int) -> Finding:
    """Compare the GPUs that nvidia-smi counts in a job with the requested number."""
    lacking = [
        f"{one['node']} shows a job {one['gpus'] or 0} of the {gpus_per_host} it asked for"
        for one in answers
        if (one["gpus"] or 0) < gpus_per_host
    ]
    shown = ", ".join(
        f"{one['node']}: {'no nvidia-smi' if one['gpus'] is None else one['gpus']}"
        for one in answers
    )
    remedy = "see what `srun --gpus-per-node=1 nvidia-smi` says: driver, gres.conf, cgroup.conf"
    return Finding("gpus on the nodes", not lacking, "; ".join(lacking) or shown, remedy)


def _check_clocks(visit: Visit) -> Finding:
    margin = _MAX_SECONDS_OF_CLOCK_DIFFERENCE
    wrong = [
        f"{one['node']} by {one['time'] - visit.ended_at:.0f} s"
        for one in visit.answers
        if not visit.started_at - margin <= one["time"] <= visit.ended_at + margin
    ]
    return Finding(
        "clock", not wrong, ", ".join(wrong) or "agrees", "have the nodes run an NTP client"
    )


def _check_names(answers: Answers) -> Finding:
    wrong = [f"on {one['node']}: {one['own_name']}" for one in answers if one["own_name"]]
    wrong += [
        f"{one['node']} does not know {', '.join(one['unknown_names'])}"
        for one in answers
        if one["unknown_names"]
    ]
    are_several = len({one["host"] for one in answers}) > 1
    return Finding(
        "host names",
        not (wrong and are_several),
        "; ".join(wrong) or "resolve",
        "give each node's name its address in DNS or /etc/hosts, and not 127.0.1.1 on the node "
        "itself",
    )


def _check_ports(answers: Answers) -> Finding:
    deaf = [f"{one['node']}: {one['unreached']}" for one in answers if one["unreached"]]
    return Finding(
        "ports between nodes",
        not deaf,
        "; ".join(deaf) or "any free one can be reached",
        "let compute nodes reach each other at any TCP port, by the names that Slurm has for them",
    )


def _check_signals(answers: Answers) -> Finding:
    deaf = [
        f"{one['node']} did not hear {' and '.join(missing)}"
        for one in answers
        if (missing := [name for name in SIGNALS if name not in one["heard"]])
    ]
    return Finding(
        "signals",
        not deaf,
        "; ".join(deaf) or f"{' and '.join(SIGNALS)} reach a job's ranks",
        "a wrapper in slurm.container or slurm.python must hand signals on (exec); without them a "
        "job cannot save before its time is over",
    )
