"""Check requests for jobs against the limits of a Slurm site: partition, QOS, association, arrays.

Reads `scontrol show config` and `partition`, `sacctmgr show assoc` and `qos`. The answers are kept
for ten minutes in `~/.redco-flow` (REDCO_FLOW_HOME); what a site does not answer is not checked.
Which limit counts where several are defined: https://slurm.schedmd.com/resource_limits.html.
"""

from __future__ import annotations

import math
import os
import pwd
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from redco_flow.errors import RedcoFlowError
from redco_flow.launch.call import JobResources
from redco_flow.launch.host_facts import Finding
from redco_flow.launch.slurm import queue
from redco_flow.records import digest_json, read_json_if_present, write_json
from redco_flow.tracking.workspace import home_directory

Tres = Mapping[str, float]
SettingProblem = tuple[tuple[str, ...], str]

_SECONDS_TO_KEEP = 600.0
_SECONDS_TO_KEEP_UNKNOWN = 30.0
_MIN_JOB_AGE = 180  # a still queue is asked every 120 s, then for up to 60 s to confirm an end
_ASSOCIATION = (
    "Account", "Partition", "DefaultQOS", "MaxWall", "MaxSubmitJobs", "GrpSubmitJobs", "MaxTRES",
    "MaxTRESPerNode", "GrpTRES",
)  # fmt: skip
_QOS = (
    "Name", "Flags", "MaxWall", "MaxSubmitJobsPerUser", "MaxSubmitJobsPerAccount", "GrpSubmitJobs",
    "MaxTRES", "MaxTRESPerNode", "MaxTRESPerUser", "MaxTRESPerAccount", "GrpTRES", "MinTRES",
)  # fmt: skip
_MINUTES = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?$")
_MIB = {"K": 1 / 1024, "M": 1.0, "G": 1024.0, "T": 1024.0**2, "P": 1024.0**3}
_SETTINGS = {
    "cpu": ("resources", "cpus_per_host"),
    "mem": ("resources", "memory_gib"),
    "node": ("resources", "num_hosts"),
}
_GPUS = ("resources", "gpus_per_host")
_SUBMIT_PLUGINS = ("JobSubmitPlugins", "CliFilterPlugins")
_OTHERS = "or choose another slurm.partition, slurm.qos or slurm.account"


@dataclass(frozen=True)
class QueueLimits:
    """The limits of one partition, QOS or association; None, or no entry, is no limit.

    Args:
        place: for people, as "QOS debug".
        submit: jobs, or tasks of arrays, that a user may have in the queue, by Slurm's word.
        tres: for one job, and for all of a user, an account or the group, by Slurm's word.
        per_node, least: of one job.
        qos: of a partition or association, the name of its QOS.
    """

    place: str
    minutes: float | None = None
    max_nodes: float | None = None
    submit: Mapping[str, int] = field(default_factory=dict)
    tres: Mapping[str, Tres] = field(default_factory=dict)
    per_node: Tres = field(default_factory=dict)
    least: Tres = field(default_factory=dict)
    flags: frozenset[str] = frozenset()
    qos: str = ""


@dataclass(frozen=True)
class JobRequest:
    """One job's request, and the names that choose its limits; "" is the site's default.

    Args:
        unchecked: what is not known: "time", "node", "cpu", "mem", "gres/gpu".
    """

    resources: JobResources
    partition: str = ""
    account: str = ""
    qos: str = ""
    gpu_type: str = ""
    unchecked: frozenset[str] = frozenset()


@dataclass(frozen=True)
class SiteLimits:
    """The limits of a site as far as it tells them.

    Args:
        unknown: why some are not known.
        max_array_size: one more than the largest index of a task; 0: no arrays.
        min_job_age: seconds for which Slurm remembers an ended job.
        associations: of this user, by (account, partition).
        submit_plugins: may change a request when it is submitted.
    """

    unknown: Sequence[str] = ()
    max_array_size: int | None = None
    min_job_age: int | None = None
    has_accounting: bool = True
    partitions: Mapping[str, QueueLimits] = field(default_factory=dict)
    default_partition: str = ""
    associations: Sequence[tuple[str, str, QueueLimits]] = ()
    qos: Mapping[str, QueueLimits] = field(default_factory=dict)
    submit_plugins: str = ""

    def problems(self, request: JobRequest) -> list[SettingProblem]:
        """Return what keeps every job of this request from ever starting, by the setting.

        Where the job may use several partitions or associations, it needs one that takes it.
        """
        resources = request.resources
        found: list[SettingProblem] = []
        if resources.shards and self.max_array_size == 0:
            found.append((("num_shards",), "the site allows no job arrays (MaxArraySize 0): set 1"))
        tried = [list(_problems(resources, request, chain)) for chain in self._chains(request)]
        return found + min(tried, key=len, default=[])

    def max_submitted(self, request: JobRequest) -> tuple[int, str] | None:
        """Return how many jobs may be in the queue at once, and the limit's name."""
        lowest = [min(_submit_limits(chain), default=None) for chain in self._chains(request)]
        known = [one for one in lowest if one is not None]
        return max(known) if len(known) == len(lowest) else None

    def array_size(self, request: JobRequest) -> int | None:
        """Return how many tasks each of a stage's arrays may have; None: one array has them all.

        Where there are more than the limit of submitted jobs, an array has half of it, so that
        one can wait in the queue while another one ends.
        """
        shards, sizes = request.resources.shards, []
        if self.max_array_size and shards and shards[-1] >= self.max_array_size:
            sizes.append(self.max_array_size)
        submitted = self.max_submitted(request)
        if submitted is not None and 0 < submitted[0] < len(shards):
            sizes.append(max(1, submitted[0] // 2))
        return min(sizes, default=None)

    def array_note(self, request: JobRequest) -> str:
        """Return how many arrays a stage is submitted as; "" where it is one."""
        num_tasks, size = len(request.resources.shards), self.array_size(request)
        if size is None:
            return ""
        reasons = []
        if self.max_array_size and num_tasks > self.max_array_size:
            reasons.append(f"MaxArraySize is {self.max_array_size}")
        submitted = self.max_submitted(request)
        if submitted is not None and num_tasks > submitted[0]:
            reasons.append(f"{submitted[1]} allows {submitted[0]} submitted jobs")
        return (
            f"a stage's {num_tasks} shards are submitted as {math.ceil(num_tasks / size)} job "
            f"arrays, each as soon as there is room ({'; '.join(reasons)})"
        )

    def _chains(self, request: JobRequest) -> Iterator[list[QueueLimits]]:
        """Yield the limits of each partition and association that the job may get.

        The partition is first; then those of which the first that defines a limit counts.
        """
        names = (request.partition or self.default_partition).split(",")
        for name in names:
            partition = self.partitions.get(name, QueueLimits(f"partition {name}"))
            owned = [
                limits
                for account, only, limits in self.associations
                if (not request.account or account == request.account) and only in ("", name)
            ]
            for association in owned or [QueueLimits("association")]:
                # Of an association without a default, the controller alone knows the QOS.
                own = self.qos.get(request.qos or association.qos)
                chain = [self.qos.get(partition.qos), own]
                if own is not None and "OverPartQOS" in own.flags:
                    chain.reverse()
                yield [partition, *(one for one in chain if one is not None), association]


def _submit_limits(chain: Sequence[QueueLimits]) -> Iterator[tuple[int, str]]:
    """Yield each limit of submitted jobs where it is first defined."""
    seen = set()
    for limits in chain:
        for word, most in limits.submit.items():
            if word not in seen:
                seen.add(word)
                yield most, f"{word} of {limits.place}"


def _problems(
    resources: JobResources, request: JobRequest, chain: Sequence[QueueLimits]
) -> Iterator[SettingProblem]:
    partition, *others = chain
    flags = frozenset().union(*(one.flags for one in others))
    if "time" not in request.unchecked:
        yield from _time_problems(resources, partition, others, flags)
    nodes = resources.num_hosts
    if (
        partition.max_nodes is not None
        and "node" not in request.unchecked
        and nodes > partition.max_nodes
        and "PartitionMaxNodes" not in flags
    ):
        yield _above("node", nodes, partition.max_nodes, f"MaxNodes of {partition.place}")
    whole = {
        name: amount
        for name, amount in _tres_of(resources, request.gpu_type).items()
        if name.removesuffix(f":{request.gpu_type}") not in request.unchecked
    }
    of_node = {name: amount / nodes for name, amount in whole.items() if name != "node"}
    seen: set[tuple[str, str]] = set()
    for limits in chain:
        levels = [(word, whole, most) for word, most in limits.tres.items()]
        for word, requested, tres in [*levels, ("MaxTRESPerNode", of_node, limits.per_node)]:
            for name, amount in tres.items():
                if (word, name) not in seen and requested.get(name, 0) > amount:
                    yield _above(name, requested[name], amount, f"{word} of {limits.place}")
                seen.add((word, name))
        for name, amount in limits.least.items():
            is_known = name != "cpu" or resources.cpus_per_host is not None
            if is_known and ("MinTRES", name) not in seen and whole.get(name, amount) < amount:
                least = f"{amount:g} (MinTRES of {limits.place})"
                text = f"{name}={whole[name]:g} is below the least of {least}; raise it, {_OTHERS}"
                yield _SETTINGS.get(name, _GPUS), text
            seen.add(("MinTRES", name))


def _time_problems(
    resources: JobResources,
    partition: QueueLimits,
    others: Sequence[QueueLimits],
    flags: frozenset[str],
) -> Iterator[SettingProblem]:
    """The partition's limit counts besides the first of the others, but for a flag of the QOS."""
    first = next((one for one in others if one.minutes is not None), None)
    for limits, word in ((partition, "MaxTime"), (first, "MaxWall")):
        if limits is None or limits.minutes is None or resources.walltime_minutes is None:
            continue
        is_exempt = limits is partition and "PartitionTimeLimit" in flags
        if resources.walltime_minutes > limits.minutes and not is_exempt:
            yield (
                ("resources", "walltime_minutes"),
                f"{resources.walltime_minutes:g} min are above the limit of {limits.minutes:g} min "
                f"({word} of {limits.place}): the job would never start. Lower it (a stage that "
                f"saves resumes in its next job: retries.timeout), {_OTHERS}",
            )


def _above(name: str, asked: float, most: float, limit: str) -> SettingProblem:
    unit = " MiB" if name == "mem" else ""
    return _SETTINGS.get(name, _GPUS), (
        f"the job would ask for {name}={asked:g}{unit}, above the limit of {most:g}{unit} "
        f"({limit}): it would never start. Lower it, {_OTHERS}"
    )


def _tres_of(resources: JobResources, gpu_type: str) -> dict[str, float]:
    """Return the TRES that one job, or one task of an array, counts as; memory in MiB."""
    nodes, ranks = resources.num_hosts, resources.processes_per_host
    cpus = max(1, (resources.cpus_per_host or ranks) // ranks) * ranks
    tres: dict[str, float] = {"node": nodes, "cpu": nodes * cpus}
    if resources.memory_gib is not None:
        tres["mem"] = nodes * math.ceil(resources.memory_gib * 1024)
    tres["gres/gpu"] = nodes * resources.gpus_per_host
    if gpu_type:
        tres[f"gres/gpu:{gpu_type}"] = tres["gres/gpu"]
    return tres


def parse_site(answers: Mapping[str, str], unknown: Sequence[str] = ()) -> SiteLimits:
    """Return the limits in the output of the commands; see `ask_site` for the keys."""
    config = _settings_of(answers)
    partitions = [
        dict(re.findall(r"(\S+?)=(\S*)", line)) for line in answers.get("partition", "").split("\n")
    ]
    rows = {
        key: [line.split("|") for line in answers.get(key, "").splitlines()]
        if _are_enforced(config)
        else []
        for key in ("assoc", "qos")
    }
    named = [one for one in partitions if "PartitionName" in one]
    defaults = [one["PartitionName"] for one in named if one.get("Default") == "YES"]
    return SiteLimits(
        unknown=unknown,
        max_array_size=_whole_number(config.get("MaxArraySize", "")),
        min_job_age=_whole_number(config.get("MinJobAge", "").removesuffix(" sec")),
        has_accounting=config.get("AccountingStorageType", "") != "accounting_storage/none",
        partitions={one["PartitionName"]: _partition(one) for one in named},
        default_partition=next(iter(defaults), ""),
        associations=[_association(row) for row in _columns(rows["assoc"], _ASSOCIATION)],
        qos={row["Name"]: _qos(row) for row in _columns(rows["qos"], _QOS)},
        submit_plugins=", ".join(
            config[key]
            for key in _SUBMIT_PLUGINS
            if config.get(key, "(null)") not in ("(null)", "")
        ),
    )


def _settings_of(answers: Mapping[str, str]) -> dict[str, str]:
    return dict(re.findall(r"^(\S+)\s*=\s*(.*?)\s*$", answers.get("config", ""), re.MULTILINE))


def _are_enforced(config: Mapping[str, str]) -> bool:
    """Whether the limits of associations and QOS count: else sacctmgr has nothing to tell."""
    enforced = re.split(r"[,\s]+", config.get("AccountingStorageEnforce", "").lower())
    return not {"limits", "safe", "all"}.isdisjoint(enforced)


def _columns(rows: Iterable[Sequence[str]], names: Sequence[str]) -> Iterator[dict[str, str]]:
    return (dict(zip(names, row, strict=True)) for row in rows if len(row) == len(names))


def _partition(values: Mapping[str, str]) -> QueueLimits:
    per_node = {}
    for key, name in (("MaxCPUsPerNode", "cpu"), ("MaxMemPerNode", "mem")):
        if (most := _amount(name, values.get(key, ""))) is not None:
            per_node[name] = most
    qos = values.get("QoS", "N/A")
    return QueueLimits(
        f"partition {values['PartitionName']}",
        minutes=parse_minutes(values.get("MaxTime", "")),
        max_nodes=_whole_number(values.get("MaxNodes", "")),
        per_node=per_node,
        qos="" if qos == "N/A" else qos,
    )


def _association(row: Mapping[str, str]) -> tuple[str, str, QueueLimits]:
    place = f"the association of account {row['Account']}"
    limits = _accounting_limits(row, place, qos=row["DefaultQOS"])
    return row["Account"], row["Partition"], limits


def _qos(row: Mapping[str, str]) -> QueueLimits:
    return _accounting_limits(row, f"QOS {row['Name']}", flags=row["Flags"])


def _accounting_limits(
    row: Mapping[str, str], place: str, *, flags: str = "", qos: str = ""
) -> QueueLimits:
    counts = {word: _whole_number(text) for word, text in row.items() if "SubmitJobs" in word}
    tres = {word: parse_tres(text) for word, text in row.items() if "TRES" in word}
    return QueueLimits(
        place,
        minutes=parse_minutes(row["MaxWall"]),
        submit={word: count for word, count in counts.items() if count is not None},
        per_node=tres.pop("MaxTRESPerNode"),
        least=tres.pop("MinTRES", {}),
        tres=tres,
        flags=frozenset(flags.split(",")),
        qos=qos,
    )


def parse_minutes(text: str) -> float | None:
    """Return a time of Slurm's ("30", "2-00:00:00", "01:00:00") in minutes; None: no limit.

    Of two numbers, as in "05:00", the first are minutes; after days, hours.
    """
    found = _MINUTES.match(text)
    if found is None:  # "UNLIMITED", "INFINITE", "NONE", ""
        return None
    days, first, second, third = (int(part or 0) for part in found.groups())
    if found[1] is not None:
        return days * 1440 + first * 60 + second + third / 60
    if found[4] is not None:
        return first * 60 + second + third / 60
    return first + second / 60


def parse_tres(text: str) -> dict[str, float]:
    """Return a TRES list ("cpu=100,mem=16G,gres/gpu=8") by name; memory in MiB."""
    pairs = (item.partition("=") for item in text.split(",") if item)
    found = {name: _amount(name, value) for name, _, value in pairs}
    return {name: amount for name, amount in found.items() if amount is not None}


def _amount(name: str, text: str) -> float | None:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGTP]?)", text)
    if found is None:
        return None
    unit = _MIB[found[2] or "M"] if name == "mem" else 1000.0 ** "_KMGTP".find(found[2] or "_")
    return float(found[1]) * unit


def _whole_number(text: str) -> int | None:
    return int(text) if text.isdecimal() else None


def examine_site(environ: Mapping[str, str], partition: str | None) -> Finding:
    """Return the limits as doctor shows them; bad where Slurm forgets jobs before it is asked."""
    site = ask_site(environ, fresh=True)
    chosen = site.partitions.get(partition or site.default_partition)
    shown = []
    if site.max_array_size is not None:
        shown.append(f"MaxArraySize {site.max_array_size}")
    if chosen is not None and chosen.minutes is not None:
        shown.append(f"MaxTime of {chosen.place} {chosen.minutes:g} min")
    for limits in (*site.qos.values(), *(one for _, _, one in site.associations)):
        shown += [f"{word} of {limits.place} {most}" for word, most in limits.submit.items()]
    if site.unknown:
        shown.append(f"not known, and not checked: {'; '.join(site.unknown)}")
    age = site.min_job_age
    is_short = age is not None and age < _MIN_JOB_AGE and not site.has_accounting
    if is_short:
        shown.append(f"MinJobAge {age} s, without accounting")
    remedy = (
        f"have slurm.conf set MinJobAge to {_MIN_JOB_AGE} or more, or an accounting storage: how "
        f"a job ended that left no records is unknown once Slurm has forgotten it"
    )
    return Finding("limits", not is_short, "; ".join(shown) or "none", remedy)


def ask_site(environ: Mapping[str, str], *, fresh: bool = False) -> SiteLimits:
    """Return the limits of the site, by its commands or by answers of the last ten minutes.

    Answers that lack something are kept for half a minute only.

    Args:
        environ: of Slurm's commands.
        fresh: ask, whatever is kept.
    """
    path = _cache_path(environ)
    kept = None if fresh else _read_kept(path) or _asked.get(path)
    if kept is None or not kept.is_young():
        kept = _asked[path] = _Answers(time.time(), *_ask(environ))
        if kept.answers:
            with suppress(OSError, RedcoFlowError):  # a home that is full or read-only
                path.parent.mkdir(parents=True, exist_ok=True)
                write_json(path, asdict(kept))
    try:
        return parse_site(kept.answers, kept.unknown)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return SiteLimits([*kept.unknown, f"an answer of Slurm was not understood: {error!r}"])


@dataclass(frozen=True)
class _Answers:
    """The answers of one round of questions, at a time in seconds since 1970."""

    time: float
    answers: dict[str, str]
    unknown: list[str]

    def is_young(self) -> bool:
        most = _SECONDS_TO_KEEP_UNKNOWN if self.unknown else _SECONDS_TO_KEEP
        return 0 <= time.time() - self.time < most


_asked: dict[Path, _Answers] = {}  # for a home that cannot be written, and for outages


def _read_kept(path: Path) -> _Answers | None:
    """Return what the file has, if it is young."""
    with suppress(OSError, ValueError, TypeError, RedcoFlowError):
        kept = _Answers(**(read_json_if_present(path) or {}))
        return kept if kept.is_young() else None
    return None


def _ask(environ: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Run the commands; none after a controller that does not answer."""
    answers: dict[str, str] = {}
    unknown: list[str] = []
    commands = {
        "config": ["scontrol", "show", "config"],
        "partition": ["scontrol", "--all", "--oneliner", "show", "partition"],
        "assoc": ["sacctmgr", "-nP", "show", "assoc", f"format={','.join(_ASSOCIATION)}"],
        "qos": ["sacctmgr", "-nP", "show", "qos", f"format={','.join(_QOS)}"],
    }
    for key, command in commands.items():
        if key == "assoc":
            config = _settings_of(answers)
            if not _are_enforced(config):
                break
            try:
                user = pwd.getpwuid(os.getuid()).pw_name
                command += [f"user={user}", f"cluster={config['ClusterName']}"]
            except KeyError as error:
                unknown.append(f"accounting, without a user's or the cluster's name: {error}")
                break
        try:
            answers[key] = queue.show(command, environ)
        except (RedcoFlowError, OSError) as error:
            unknown.append(str(error))
            if key == "config":
                break
    return answers, unknown


def _cache_path(environ: Mapping[str, str]) -> Path:
    """Return the file of one user, host and configuration: clusters may share a home."""
    whose = [os.getuid(), os.uname().nodename, environ.get("SLURM_CONF", "")]
    return home_directory(environ) / f"slurm-limits-{digest_json(whose)[:12]}.json"
