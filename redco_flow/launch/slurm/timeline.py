"""When a job would start, by the jobs that run and those that Slurm's backfill scheduler planned.

`sbatch --test-only` tests a job against the jobs that run. For those that wait it adds one delay,
which is the same for every request and ignores backfilling: the CPUs of their nodes times their
time limits, divided by the CPUs of the partition (Slurm 22.05, src/slurmctld/job_scheduler.c,
_delayed_job_start_time). Here each job keeps its CPUs and GPUs from its start to its time limit,
and a new job starts where it fits between them, as the backfill scheduler places it.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from redco_flow.errors import StageFailed
from redco_flow.launch.executor import ExpectedStart
from redco_flow.launch.slurm.limits import parse_minutes, parse_tres
from redco_flow.launch.slurm.nodes import expand_nodes
from redco_flow.launch.slurm.queue import Estimate, gpus_of, show_planned

_JOB_FIELDS = (
    "JobArrayID", "Partition", "State", "Reason", "NumNodes", "NumCPUs", "TimeLimit", "StartTime",
    "EndTime", "NodeList", "SchedNodes", "OverSubscribe", "tres-alloc", "tres-per-node",
    "tres-per-job",
)  # fmt: skip
_NODE_FIELDS = ("NodeList", "Partition", "PriorityTier", "CPUs", "Gres", "StateCompact")
_CAN_START_JOBS = re.compile(r"(idle|mix|alloc|comp|plnd)[~#%+-]?")
_IN_TURN = ("None", "Priority", "Resources")  # reasons of a job that starts once there is room


@dataclass(frozen=True)
class Job:
    """A job that runs or waits.

    Args:
        partitions: one; several of a job that waits for any of them.
        nodes: that it has or, by Slurm's plan, will have; empty if Slurm has not planned it.
        start, end: in seconds since 1970, the end by its time limit.
        cpus, gpus: on each of its nodes; infinite CPUs are all of them.
        num_cpus: that it requests.
        minutes: its time limit.
        is_in_turn: whether it waits for nothing else than free nodes.
    """

    partitions: Sequence[str]
    is_waiting: bool
    nodes: Sequence[str]
    start: float
    end: float
    cpus: float
    gpus: float
    num_nodes: int = 1
    num_cpus: int = 1
    minutes: float = math.inf
    is_in_turn: bool = True


@dataclass
class Partition:
    """The nodes of a partition.

    Args:
        tier: its PriorityTier.
        num_nodes, num_cpus: of all nodes, also of those that are down.
        nodes: those that can start jobs, with the CPUs and GPUs of each.
    """

    tier: int
    num_nodes: int = 0
    num_cpus: int = 0
    nodes: dict[str, tuple[float, float]] = field(default_factory=dict)


def expected_start(
    tested: Estimate,
    gpus_per_node: int | None,
    seconds: float,
    jobs: Sequence[Job],
    partitions: Mapping[str, Partition],
    now: float,
) -> ExpectedStart:
    """Return when a job would start that was tested, after all jobs that are planned.

    Jobs of partitions with a lower PriorityTier count in the test alone: they may be preempted.

    Args:
        gpus_per_node: None: not known; all are waited for.
        seconds: its time limit.
    """
    if (own := partitions.get(tested.partition)) is None:
        return ExpectedStart(tested.start, "sbatch --test-only: its nodes are not known")
    delay = _delay(tested.partition, own, jobs)
    ahead = [job for job in jobs if _is_ahead(job, tested.partition, partitions)]
    num_waiting = sum(job.is_waiting for job in ahead)
    if not num_waiting and not delay:
        return ExpectedStart(tested.start, "sbatch --test-only")
    share = (tested.cpus / tested.num_nodes, gpus_per_node)
    planned = earliest_start(own.nodes, ahead, share, tested.num_nodes, seconds, now)
    if planned == math.inf:
        why = f"no room after {num_waiting} ahead"
        return ExpectedStart(tested.start, f"sbatch --test-only: {why}")
    if num_unplanned := sum(not job.nodes for job in ahead):
        why = f"{num_unplanned} of {num_waiting} ahead not planned"
        return ExpectedStart(max(tested.start, planned), f"sbatch --test-only or later: {why}")
    # Without the delay, the test knows what the plan does not: reservations, features, licenses.
    start = max(planned, tested.start - delay)
    return ExpectedStart(start, f"squeue: {num_waiting} ahead")


def _delay(name: str, partition: Partition, jobs: Iterable[Job]) -> float:
    """Return at least the seconds that `--test-only` adds for the jobs that wait."""
    cpus_per_node = partition.num_cpus / partition.num_nodes
    cpu_minutes = sum(
        max(cpus_per_node * job.num_nodes, job.num_cpus) * job.minutes
        for job in jobs
        if job.is_waiting and name in job.partitions
    )
    return 60 * cpu_minutes / partition.num_cpus


def _is_ahead(job: Job, partition: str, partitions: Mapping[str, Partition]) -> bool:
    """Whether a job takes room on a partition's nodes before a new job of the partition."""
    own = partitions[partition]
    tiers = [partitions[name].tier for name in job.partitions if name in partitions]
    if tiers and max(tiers) < own.tier:
        return False
    if job.nodes:
        return any(node in own.nodes for node in job.nodes)
    return job.is_in_turn and partition in job.partitions


def earliest_start(
    nodes: Mapping[str, tuple[float, float]],
    jobs: Iterable[Job],
    share: tuple[float, int | None],
    num_nodes: int,
    seconds: float,
    now: float,
) -> float:
    """Return when a job first fits on enough nodes at once, for its whole time; infinity: never.

    Args:
        nodes: the CPUs and GPUs of each.
        share: the CPUs and GPUs that the job needs on each of its nodes; None: all GPUs.
        seconds: its time limit.
    """
    on_node: dict[str, list[Job]] = defaultdict(list)
    for job in jobs:
        for node in job.nodes:
            on_node[node].append(job)
    # How many nodes cannot be used changes at these times: down at an end, then up at a start.
    changes = [(now, 0)]
    for node, capacity in nodes.items():
        for first, last in _not_before(_full(on_node[node], capacity, share), seconds, now):
            changes += [(first, 1), (last, -1)]
    num_blocked = 0
    for when, change in sorted(changes):
        num_blocked += change
        if change <= 0 and len(nodes) - num_blocked >= num_nodes:
            return when
    return math.inf


def _full(
    jobs: Sequence[Job], capacity: tuple[float, float], share: tuple[float, int | None]
) -> Iterator[tuple[float, float]]:
    """Yield the times from and to which the jobs of a node leave less than a share of it."""
    most_cpus = capacity[0] - share[0]
    most_gpus = 0 if share[1] is None else capacity[1] - share[1]
    times = sorted({time for job in jobs for time in (job.start, job.end)})
    for start, end in pairwise([-math.inf, *times, math.inf]):
        present = [job for job in jobs if job.start <= start < job.end]
        cpus, gpus = sum(job.cpus for job in present), sum(job.gpus for job in present)
        if cpus > most_cpus or gpus > most_gpus:
            yield start, end


def _not_before(
    full: Iterable[tuple[float, float]], seconds: float, now: float
) -> list[tuple[float, float]]:
    """Return the times between which a job would meet a full one, without overlaps."""
    found: list[tuple[float, float]] = []
    for start, end in full:
        first = start - seconds
        if found and first < found[-1][1]:
            found[-1] = (found[-1][0], end)
        elif end > now:
            found.append((first if first >= now else -math.inf, end))
    return found


def read_planned(environment: Mapping[str, str]) -> tuple[list[Job], dict[str, Partition]]:
    """Return all jobs, with the starts that Slurm has planned, and the partitions by name.

    Raises:
        StageFailed, ClusterUnreachable: as `queue.show_planned`, or an answer is not understood.
    """
    jobs, nodes = show_planned(_JOB_FIELDS, _NODE_FIELDS, environment)
    try:
        return _parse_jobs(jobs), _parse_partitions(nodes)
    except (LookupError, ValueError) as error:
        raise StageFailed(f"squeue and sinfo answer in another format: {error}") from error


def _parse_jobs(text: str) -> list[Job]:
    """Read squeue's lines."""
    found = []
    for line in text.splitlines():
        values = dict(zip(_JOB_FIELDS, line.split("|"), strict=False))
        is_waiting, is_exclusive = values["State"] == "PENDING", values["OverSubscribe"] == "NO"
        num_nodes, num_cpus = max(1, int(values["NumNodes"])), int(values["NumCPUs"])
        nodes = values["SchedNodes" if is_waiting else "NodeList"]
        tres = parse_tres(values["tres-alloc"])
        job = Job(
            values["Partition"].split(","),
            is_waiting,
            expand_nodes(nodes) if nodes not in ("", "(null)") else [],
            _seconds(values["StartTime"]),
            _seconds(values["EndTime"]),
            math.inf if is_exclusive else num_cpus / num_nodes,
            tres.get("gres/gpu", gpus_of(values["tres-per-job"])) / num_nodes
            or gpus_of(values["tres-per-node"]),
            num_nodes,
            num_cpus,
            parse_minutes(values["TimeLimit"]) or math.inf,
            values["Reason"] in _IN_TURN,
        )
        found.append(job)
        if is_waiting and "[" in values["JobArrayID"]:  # squeue shows the start of one task
            found.append(replace(job, nodes=[], minutes=0))
    return found


def _parse_partitions(text: str) -> dict[str, Partition]:
    """Read sinfo's lines."""
    found: dict[str, Partition] = {}
    for line in text.splitlines():
        node, name, tier, cpus, gres, state = line.split("|")[: len(_NODE_FIELDS)]
        partition = found.setdefault(name.rstrip("*"), Partition(int(tier)))
        partition.num_nodes += 1
        partition.num_cpus += int(cpus)
        if _CAN_START_JOBS.fullmatch(state):
            partition.nodes[node] = (float(cpus), float(gpus_of(gres)))
    return found


def _seconds(text: str) -> float:
    """Return a time; infinity for one that Slurm does not say."""
    return float(text) if text.isdigit() else math.inf
