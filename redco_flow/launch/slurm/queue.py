"""Slurm's commands (sbatch, squeue, sacct, scancel), and its queue as all jobs of a process see it.

Knows their options and output formats. No shell, and no judgement of what is said. One
`SlurmQueue` asks for all jobs of a cluster, whichever runs they belong to.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import subprocess
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from redco_flow.errors import ClusterUnreachable, StageFailed
from redco_flow.launch.slurm.messages import find_submit_limit, is_transient
from redco_flow.launch.slurm.nodes import expand_nodes

_COMMAND_SECONDS = 30.0
_SUBMIT_SECONDS = 60.0
_SHOW_SECONDS = 5.0
_PLAN_SECONDS = 2.0
_FIELDS = (
    "JobArrayID:40", "State:20", "RestartCnt:10", "Reason:60", "NodeList:400", "SubmitTime:30",
    "Name:200",
)  # fmt: skip
_TIMES_AS_SECONDS = {"SLURM_TIME_FORMAT": "%s"}  # since 1970: no time zone, no daylight saving
_DEPENDENCY_WIDTH = 100_000
_GPUS = re.compile(r"gpu(?::[^:(),]+)?:(\d+)")  # "gpu:a100:8(S:0-1),nic:2"
_TESTED = re.compile(
    r"to start at (\d+) (?:using (\d+) processors on nodes (\S+) in partition (\S+))?"
)


class TryLater(ClusterUnreachable):
    """A command failed for a reason that passes; sbatch may have submitted the job all the same.

    Args:
        limit: the limit of submitted jobs that sbatch named; "" for any other reason.
    """

    def __init__(self, message: str, limit: str = "") -> None:
        super().__init__(message)
        self.limit = limit


@dataclass(frozen=True)
class JobEntry:
    """Slurm's entry for one job, or for one task of an array.

    Args:
        job_id: as "123", of a task "123_4".
        state: in Slurm's words: PENDING, RUNNING, NODE_FAIL, ….
        restarts: how often it was restarted; None if Slurm does not report it.
        reason: why it waits.
        hosts: as `n[1-2]`.
        submitted_at: in seconds since 1970, later after a requeue; None if Slurm does not report
            it.
    """

    job_id: str
    state: str
    restarts: int | None = None
    reason: str = ""
    hosts: str = ""
    name: str = ""
    submitted_at: int | None = None


@dataclass(frozen=True)
class Estimate:
    """The answer of `sbatch --test-only`.

    Args:
        start: in seconds since 1970.
        cpus: of the whole job.
        partition: that it would start in; "" if Slurm only says the time.
    """

    start: float
    cpus: int = 0
    num_nodes: int = 0
    partition: str = ""


def submit(script: Path, environment: Mapping[str, str]) -> str:
    """Return the id of the job that Slurm made of a script.

    Raises:
        StageFailed: Slurm refuses it for good; has Slurm's words.
        TryLater: it refuses it for now; the job may have been accepted all the same.
        ClusterUnreachable: there is no sbatch.
    """
    try:
        said = _run(["sbatch", "--parsable", str(script)], environment, _SUBMIT_SECONDS)
    except StageFailed as refusal:
        if limit := find_submit_limit(str(refusal)):
            raise TryLater(str(refusal), limit) from refusal
        raise
    # "123" or "123;cluster", after whatever a site's plugin prints.
    found = re.findall(r"^(\d+)(?:;\S+)?$", said, re.MULTILINE)
    if not found:
        raise TryLater(f"sbatch gave no job id for {script}: {said.strip()!r}.")
    return str(found[-1])


def list_jobs(environment: Mapping[str, str]) -> dict[str, JobEntry]:
    """Return every job of this user that Slurm still remembers, by id: one request.

    Raises:
        ClusterUnreachable: there is no answer.
        StageFailed: squeue fails in another way.
    """
    layout = ",".join(f"{field}|" for field in _FIELDS)
    options = ["--me", "--array", "--noheader", "--states=all", f"--Format={layout}"]
    said = _run(["squeue", *options], {**environment, **_TIMES_AS_SECONDS})
    entries = (_entry(line) for line in said.splitlines())
    return {entry.job_id: entry for entry in entries if entry is not None}


def find_accounted(job_ids: Iterable[str], environment: Mapping[str, str]) -> dict[str, JobEntry]:
    """Return what the accounting says of jobs that the queue has forgotten.

    Raises:
        StageFailed, ClusterUnreachable: there is no accounting, or it does not answer.
    """
    columns = "--format=JobID%40,State,NodeList,Submit,JobName%200"
    options = ["--allocations", "--noheader", "--parsable2", f"--jobs={','.join(job_ids)}", columns]
    said = _run(["sacct", *options], {**environment, **_TIMES_AS_SECONDS})
    found = {}
    for line in said.splitlines():
        parts = line.split("|", 4)
        if len(parts) == 5:
            job_id, state, hosts, submitted_at, name = parts
            word = state.split(" ")[0]
            found[job_id] = JobEntry(job_id, word, None, "", hosts, name, _number(submitted_at))
    return found


def cancel(
    job_id: str, name: str, environment: Mapping[str, str], *, at_once: bool = False
) -> None:
    """Have Slurm end a job; one that has ended already is left as it is.

    Args:
        name: a job of another name, that has got the id since, is left alone; "" takes any.

    Raises:
        ClusterUnreachable: there is no answer; the job runs on.
        StageFailed: Slurm refuses.
    """
    options = ["--quiet", *([f"--name={name}"] if name else [])]
    if at_once:
        with contextlib.suppress(StageFailed):  # it has no processes
            _run(["scancel", *options, "--full", "--signal=KILL", job_id], environment)
    _run(["scancel", *options, job_id], environment)


def drop_dependencies(job_id: str, others: Collection[str], environment: Mapping[str, str]) -> bool:
    """Have a job that waits in the queue wait no longer for some other jobs.

    Returns:
        whether it waited for one of them.

    Raises:
        StageFailed, ClusterUnreachable: it waits as before; the former has Slurm's words.
    """
    layout = f"--Format=Dependency:{_DEPENDENCY_WIDTH}"
    said = _run(["squeue", "--noheader", f"--jobs={job_id}", layout], environment).strip()
    # "afterok:7(unfulfilled)"; of an array there may be several lines.
    found = (re.sub(r"\(\w+\)$", "", term) for term in re.split(r"[,\s]+", said))
    terms = list(dict.fromkeys(filter(None, found)))
    left = [term for term in terms if term.partition(":")[2].removesuffix("_*") not in others]
    if left == terms:
        return False
    _run(["scontrol", "update", f"JobId={job_id}", f"Dependency={','.join(left)}"], environment)
    return True


def release(job_id: str, environment: Mapping[str, str]) -> None:
    """Let a held job start.

    Raises:
        StageFailed, ClusterUnreachable: it stays held; the former has Slurm's words.
    """
    _run(["scontrol", "release", job_id], environment)


def list_partitions(environment: Mapping[str, str]) -> dict[str, int]:
    """Return the number of nodes of each partition.

    Raises:
        ClusterUnreachable, StageFailed: Slurm does not answer.
    """
    said = _run(["sinfo", "--noheader", "--format=%R %D"], environment)
    found: dict[str, int] = {}
    for line in said.splitlines():
        name, count = line.split()
        found[name] = found.get(name, 0) + int(count)
    return found


def count_gpus(partition: str | None, environment: Mapping[str, str]) -> dict[str, int]:
    """Return how many GPUs Slurm has for each node of a partition, of any type.

    Args:
        partition: None: every node.

    Raises:
        ClusterUnreachable, StageFailed: Slurm does not answer.
    """
    chosen = [f"--partition={partition}"] if partition else []
    said = _run(["sinfo", "--Node", "--noheader", "--format=%N %G", *chosen], environment)
    found = {}
    for line in said.splitlines():
        node, _, resources = line.partition(" ")
        found[node] = gpus_of(resources)
    return found


def gpus_of(resources: str) -> int:
    """Return the number of GPUs in Slurm's word for generic or trackable resources."""
    return sum(int(count) for count in _GPUS.findall(resources))


def show(command: list[str], environment: Mapping[str, str]) -> str:
    """Return what scontrol or sacctmgr shows, in seconds.

    Raises:
        ClusterUnreachable, StageFailed: it does not answer, or refuses.
    """
    return _run(command, environment, _SHOW_SECONDS)


def try_submission(options: Iterable[str], environment: Mapping[str, str]) -> None:
    """Have Slurm say whether it would take a job with these options; none is submitted.

    Raises:
        StageFailed: Slurm would refuse it; has Slurm's words.
        ClusterUnreachable: there is no answer.
    """
    _test([*options, "--time=1", "--wrap=true"], environment)


def tested_start(script: Path, environment: Mapping[str, str]) -> Estimate:
    """Return what Slurm expects of a script's job, and when it starts; none is submitted.

    Raises:
        StageFailed: Slurm would refuse it; has Slurm's words.
        ClusterUnreachable: there is no answer, or none that has the time.
    """
    said = _test([str(script)], {**environment, **_TIMES_AS_SECONDS})
    if (found := _TESTED.search(said)) is None:
        raise TryLater(f"sbatch --test-only names no time: {' '.join(said.split())!r}.")
    start, cpus, nodes, partition = found.groups()
    if nodes is None:
        return Estimate(float(start))
    return Estimate(float(start), int(cpus), len(expand_nodes(nodes)), partition)


def show_planned(
    job_fields: Iterable[str], node_fields: Iterable[str], environment: Mapping[str, str]
) -> tuple[str, str]:
    """Return lines of squeue for every job, with planned starts, and of sinfo for every node.

    Raises:
        StageFailed, ClusterUnreachable: one fails, or does not answer within two seconds.
    """

    def show(command: list[str], fields: Iterable[str]) -> str:
        layout = ",".join(f"{field}:|" for field in fields)
        options = ["--noheader", "--noconvert", f"--Format={layout}"]
        return _run([*command, *options], {**environment, **_TIMES_AS_SECONDS}, _PLAN_SECONDS)

    return show(["squeue"], job_fields), show(["sinfo", "--Node"], node_fields)


def _test(arguments: list[str], environment: Mapping[str, str]) -> str:
    """Return what Slurm says of a job that is not submitted."""
    return _complete(["sbatch", "--test-only", *arguments], environment, _COMMAND_SECONDS).stderr


def send_signal(job_id: str, name: str, environment: Mapping[str, str]) -> None:
    """Send a signal to every rank of a job.

    Raises:
        StageFailed, ClusterUnreachable: it was not sent.
    """
    _run(["scancel", f"--signal={name}", job_id], environment)


def _run(
    command: list[str],
    environment: Mapping[str, str],
    seconds: float = _COMMAND_SECONDS,
) -> str:
    return _complete(command, environment, seconds).stdout


def _complete(
    command: list[str], environment: Mapping[str, str], seconds: float
) -> subprocess.CompletedProcess[str]:
    name = command[0]
    # A user's defaults for a command, as SQUEUE_PARTITION or SCANCEL_STATE, would hide jobs.
    defaults = (f"{name.upper()}_", "SLURM_CLUSTERS")
    try:
        done = subprocess.run(
            command,
            env={key: value for key, value in environment.items() if not key.startswith(defaults)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
            check=False,
        )
    except FileNotFoundError as error:
        raise ClusterUnreachable(
            f"there is no command {name} on {os.uname().nodename}: Slurm's commands must be on "
            f"PATH where the process that drives a run is (on this machine, or on a node with "
            f"`launcher: slurm`)."
        ) from error
    except subprocess.TimeoutExpired as error:
        raise TryLater(f"{name} did not answer within {seconds:g} s.") from error
    if done.returncode == 0:
        return done
    said = " ".join(done.stderr.split())
    if is_transient(said):
        raise TryLater(f"{name}: {said}")
    if done.returncode < 0:  # as when the node of a launcher is taken away: Slurm may have heard it
        raise TryLater(f"{name} was ended by signal {-done.returncode}.")
    raise StageFailed(f"{name} failed with code {done.returncode}: {said}")


def _entry(line: str) -> JobEntry | None:
    parts = [part.strip() for part in line.split("|", len(_FIELDS))]
    if len(parts) < len(_FIELDS):
        return None
    job_id, state, restarts, reason, hosts, submitted_at, name = parts[: len(_FIELDS)]
    return JobEntry(
        job_id=job_id,
        state=state,
        restarts=_number(restarts),
        reason="" if reason == "None" else reason,
        hosts=hosts,
        name=name,
        submitted_at=_number(submitted_at),
    )


def _number(text: str) -> int | None:
    return int(text) if text.isdigit() else None


SECONDS_BETWEEN_REQUESTS = 10.0
SECONDS_BETWEEN_URGENT_REQUESTS = 1.0
_MAX_SECONDS = 120.0
_SHARE_OF_STILLNESS = 0.1  # after an hour without a change, ask every two minutes
_SECONDS_WITHOUT_ACCOUNTING = 600.0
_MAX_ACCOUNTING_FAILURES = 8  # in about ten minutes

Clock = Callable[[], float]
ListJobs = Callable[[], dict[str, JobEntry]]
FindAccounted = Callable[[Iterable[str]], dict[str, JobEntry]]


@dataclass(frozen=True)
class QueueView:
    """One answer of Slurm's.

    Args:
        entries: every job that it knows, by id.
        asked_at: when, on the queue's clock; minus infinity where it never answered.
        problem: why the last request after this answer failed; "" where it did not.
    """

    entries: Mapping[str, JobEntry] = field(default_factory=dict)
    asked_at: float = float("-inf")
    problem: str = ""

    @functools.cached_property
    def by_job(self) -> Mapping[str, Sequence[JobEntry]]:
        """The entries of each job, or of the tasks of each array, by its id."""
        found: dict[str, list[JobEntry]] = defaultdict(list)
        for entry in self.entries.values():
            found[entry.job_id.partition("_")[0]].append(entry)
        return found


def back_off(num_failures: int) -> float:
    """Return the seconds to wait after a number of failures in a row: 10, 20, … 120."""
    return min(SECONDS_BETWEEN_REQUESTS * 2.0 ** min(num_failures - 1, 8), _MAX_SECONDS)


class NotAskedYet(Exception):
    """The accounting has not been asked for a job, or did not answer: it may know it."""


class SlurmQueue:
    """Slurm's answers, shared by every thread of a process.

    Args:
        list_jobs: asks for all jobs.
        find_accounted: asks the accounting for some; raises where there is none.
        clock: seconds.
    """

    def __init__(
        self,
        list_jobs: ListJobs,
        find_accounted: FindAccounted,
        clock: Clock = time.monotonic,
    ) -> None:
        self.clock = clock
        self._list_jobs = list_jobs
        self._find_accounted = find_accounted
        self._asking = threading.Lock()
        self._view = QueueView()
        self._tried_at = float("-inf")
        self._changed_at = clock()
        self._num_failures = 0
        self._found_at: dict[Hashable, float] = {}
        self._accounted: dict[str, JobEntry | None] = {}
        self._to_account: set[str] = set()
        self._asking_accounting = threading.Lock()
        self._num_accounting_failures = 0
        self._no_accounting_until = float("-inf")
        self._accounting_due_at = float("-inf")

    @property
    def view(self) -> QueueView:
        """The newest answer, without asking."""
        return self._view

    def look(self, *, urgent: bool = False) -> QueueView:
        """Return the newest answer; ask again if it is old and no other thread is asking.

        Args:
            urgent: something has happened that Slurm must know more of by now.
        """
        if self._is_due(urgent=urgent) and self._asking.acquire(blocking=False):
            try:
                if self._is_due(urgent=urgent):
                    self._ask()
            finally:
                self._asking.release()
        return self._view

    def is_confirmed(self, finding: Hashable, view: QueueView) -> bool:
        """Say whether an answer confirms what was found before it was asked; once for each answer.

        A caller's records may be newer than the answer that it has.

        Args:
            finding: what the caller sees in its records and in `view`.
        """
        if view.asked_at <= self._found_at.setdefault(finding, self.clock()):
            return False
        self._found_at[finding] = self.clock()
        return True

    def expect_accounted(self, job_id: str) -> None:
        """Have the next request to the accounting ask for this job too."""
        if self._accounted.get(job_id) is None:
            self._to_account.add(job_id)

    def accounted(self, job_id: str) -> JobEntry | None:
        """Return what the accounting knows of a job; None where it knows nothing, or is not there.

        One request asks for every job that was named here and has no entry yet.

        Raises:
            NotAskedYet: the answer is still to come.
        """
        self.expect_accounted(job_id)
        is_known = self._accounted.get(job_id) is not None
        if not is_known and self._asking_accounting.acquire(blocking=False):
            try:
                if self.clock() >= max(self._no_accounting_until, self._accounting_due_at):
                    self._ask_accounting()
            finally:
                self._asking_accounting.release()
        if job_id not in self._accounted and self.clock() >= self._no_accounting_until:
            raise NotAskedYet
        return self._accounted.get(job_id)

    def forget_accounted(self, job_id: str) -> None:
        """Have the accounting asked again for a job that it knew as not ended."""
        self._accounted.pop(job_id, None)

    def _ask_accounting(self) -> None:
        """Ask for all jobs at once; pause after failures, or where there is no accounting."""
        job_ids = sorted(self._to_account)
        self._accounting_due_at = self.clock() + SECONDS_BETWEEN_REQUESTS
        try:
            found = self._find_accounted(job_ids)
        except (ClusterUnreachable, StageFailed) as error:
            self._num_accounting_failures += 1
            self._accounting_due_at = self.clock() + back_off(self._num_accounting_failures)
            is_absent = not isinstance(error, TryLater)
            if is_absent or self._num_accounting_failures >= _MAX_ACCOUNTING_FAILURES:
                self._no_accounting_until = self.clock() + _SECONDS_WITHOUT_ACCOUNTING
                self._num_accounting_failures = 0
        else:
            self._num_accounting_failures = 0
            self._accounted |= {job_id: found.get(job_id) for job_id in job_ids}
            self._to_account -= found.keys()

    def _is_due(self, *, urgent: bool) -> bool:
        wait = SECONDS_BETWEEN_URGENT_REQUESTS
        if not urgent:
            # A job that waits for two days must not cost 17,000 requests.
            still = _SHARE_OF_STILLNESS * (self._tried_at - self._changed_at)
            wait = min(max(still, SECONDS_BETWEEN_REQUESTS), _MAX_SECONDS)
        if self._num_failures:
            wait = back_off(self._num_failures)
        return self.clock() - self._tried_at >= wait

    def _ask(self) -> None:
        self._tried_at = asked_at = self.clock()
        try:
            entries = self._list_jobs()
        except (ClusterUnreachable, StageFailed) as error:
            self._num_failures += 1
            self._view = QueueView(self._view.entries, self._view.asked_at, str(error))
        else:
            self._num_failures = 0
            if _states(entries) != _states(self._view.entries):
                self._changed_at = asked_at
            self._view = QueueView(entries, asked_at)


def _states(entries: Mapping[str, JobEntry]) -> dict[str, tuple[str, str]]:
    return {job_id: (entry.state, entry.reason) for job_id, entry in entries.items()}


SUBMITTERS_CLUSTER = "REDCO_FLOW_SUBMITTERS_SLURM_CONF"
"""In the environment of a job that drives a run: $SLURM_CONF of the process that submitted it. In
jobs, slurmd sets $SLURM_CONF, perhaps to a file that only its node has."""


def cluster_of(environment: Mapping[str, str]) -> str:
    """Return the cluster as records name it: $SLURM_CONF outside of jobs."""
    return environment.get(SUBMITTERS_CLUSTER, environment.get("SLURM_CONF", ""))


def environment_of(cluster: str) -> dict[str, str]:
    """Return the environment of Slurm's commands for a cluster; see `shared_queue`."""
    if not cluster or cluster == os.environ.get(SUBMITTERS_CLUSTER):  # this job's own cluster
        return dict(os.environ)
    return {**os.environ, "SLURM_CONF": cluster}


@functools.lru_cache
def shared_queue(cluster: str) -> SlurmQueue:
    """Return the one queue of this process for a cluster: all jobs share its requests.

    Args:
        cluster: as of `cluster_of`; "" for the machine's own.
    """
    return SlurmQueue(
        lambda: list_jobs(environment_of(cluster)),
        lambda job_ids: find_accounted(job_ids, environment_of(cluster)),
    )
