"""The `slurm:` section of a profile.

What a stage asks for (hosts, memory, time) is the pipeline's. `setup` and `options` are the
operator's own shell and Slurm text and are taken as they are, but one line each: a line break in
them would be a second command.
"""

from __future__ import annotations

import itertools
import math
import re
import shlex
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field, StringConstraints, ValidationInfo, field_validator

from redco_flow.errors import DoesNotFit
from redco_flow.launch.config import BetweenFabrics, ExecutorConfig
from redco_flow.launch.slurm.nodes import expand_nodes
from redco_flow.spec.model import (
    OF_RECORD,
    Line,
    Name,
    PositiveFloat,
    PositiveInt,
    StrictModel,
)

if TYPE_CHECKING:
    from redco_flow.launch.call import JobResources
    from redco_flow.launch.slurm.limits import JobRequest

_SHORT_OPTIONS = {
    "A": "account", "a": "array", "B": "extra-node-info", "b": "begin", "C": "constraint",
    "c": "cpus-per-task", "D": "chdir", "d": "dependency", "e": "error", "F": "nodefile",
    "G": "gpus", "i": "input", "J": "job-name", "L": "licenses", "M": "clusters",
    "m": "distribution", "N": "nodes", "n": "ntasks", "o": "output", "p": "partition",
    "q": "qos", "S": "core-spec", "t": "time", "w": "nodelist", "x": "exclude",
}  # fmt: skip
_ALL = frozenset({"node", "cpu", "mem", "gres/gpu"})
# What is known only to Slurm where `options` have the name.
_DECIDES = {
    "time-min": frozenset({"time"}),
    **dict.fromkeys(("mem", "mem-per-cpu", "mem-per-gpu"), frozenset({"mem"})),
    **dict.fromkeys(("cpus-per-task", "cpus-per-gpu", "mincpus"), frozenset({"cpu", "mem"})),
    **dict.fromkeys(
        (
            "gpus", "gpus-per-node", "gpus-per-task", "gpus-per-socket", "gres", "tres-per-task",
            "ntasks-per-gpu",
        ),
        frozenset({"gres/gpu", "cpu", "mem"}),
    ),
    **dict.fromkeys(
        (
            "nodes", "nodelist", "nodefile", "use-min-nodes", "ntasks", "ntasks-per-node",
            "ntasks-per-core", "ntasks-per-socket", "exclusive", "overcommit", "sockets-per-node",
            "cores-per-socket", "threads-per-core", "extra-node-info", "hint",
        ),
        _ALL,
    ),
}  # fmt: skip
_SELECTION = ("partition", "account", "qos", "reservation", "constraint")
_CONCERN_LIMITS = ("time", "partition", "account", "qos", "clusters", *_DECIDES)
_MIN_SECONDS_OF_LAUNCHER = 300  # until its warning, which Slurm may send a minute earlier
_SHORT_FLAGS = {"H": "hold", "k": "no-kill", "O": "overcommit", "s": "oversubscribe", "W": "wait"}
_REFUSED = {
    "clusters": "jobs of another cluster cannot be followed or cancelled from this one: remove it, "
    "and run redco-flow on that cluster's login node, or with SLURM_CONF set to its slurm.conf",
    "job-name": "a job is recognised by its own name: remove it (--comment can hold a text for "
    "people)",
    "array": "the stage would run once in each task: remove it (num_shards of preprocess makes an "
    "array)",
    "chdir": "a job runs in the directory of its attempt: remove it",
    **dict.fromkeys(
        ("output", "error"),
        "`redco-flow logs` and the run's records need the job's own log: remove it",
    ),
    "signal": "slurm.warning_seconds chooses when a job is warned of its end: remove it",
    "test-only": "no job would be submitted: remove it (`redco-flow doctor` tests the options)",
    "wait": "each submission would wait for the end of its job: remove it",
    "wrap": "it would take the place of the job's script: remove it",
}
"""Options that would break a job, and why; sbatch takes their abbreviations, too."""


def _option(text: str) -> str:
    """Return the long form, as jobs' own options are compared with it."""
    if short := re.fullmatch(r"-([A-Za-z])\s*(.*)", text):
        letter, value = short.groups()
        if value and letter in _SHORT_OPTIONS:
            return f"--{_SHORT_OPTIONS[letter]}={value}"
        if not value and letter in _SHORT_FLAGS:
            return f"--{_SHORT_FLAGS[letter]}"
        raise ValueError(
            f"-{letter} {'is no option of sbatch with' if value else 'lacks'} a value; write an "
            f"option as in `-A account` or --exclusive"
        )
    return _long_option(text)


def _long_option(text: str) -> str:
    if not text.startswith("--"):
        raise ValueError("must be a long option, such as --exclusive")
    return text


SlurmName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.,+:/-]*$")]
"""A name that the cluster's administrator chose: a partition, an account, a QOS."""


def _sbatch_option(text: str, info: ValidationInfo) -> str:
    option = _option(text)
    if info.context == OF_RECORD:
        return option
    for name in _names_in(option, _REFUSED):
        raise ValueError(f"--{name}: {_REFUSED[name]}")
    return option


def _names_in(option: str, names: Collection[str]) -> list[str]:
    """Return those of the names that an option's words have, shortened or not."""
    words = [word[2:].partition("=")[0] for word in shlex.split(option) if word.startswith("--")]
    return [name for word in words if len(word) > 2 for name in names if name.startswith(word)]


def _without_contradictions(options: list[str], info: ValidationInfo) -> list[str]:
    if info.context == OF_RECORD:
        return options
    keys = [key for key in _SELECTION if info.data.get(key) is not None]
    for option in options:
        for key in _names_in(option, keys):
            raise ValueError(
                f"{option} and the section's {key} ({info.data[key]}) are both given: remove one"
            )
    return options


SbatchOption = Annotated[Line, AfterValidator(_sbatch_option)]
SbatchOptions = Annotated[list[SbatchOption], AfterValidator(_without_contradictions)]


class LauncherConfig(StrictModel):
    """The small job that drives a run where the profile has `launcher: slurm`.

    Args:
        partition, account, qos, constraint, reservation, walltime_minutes: None takes the value of
            the section that this is in. At the end of its time the job is queued again.
        options: further options of sbatch; the section's, which may be for GPUs or several nodes,
            are not taken.
        memory_gib: of its one process.
    """

    partition: SlurmName | None = None
    account: SlurmName | None = None
    qos: SlurmName | None = None
    reservation: SlurmName | None = None
    constraint: Line | None = None
    options: SbatchOptions = Field(default_factory=list)
    walltime_minutes: PositiveInt | None = None
    memory_gib: PositiveFloat = 2.0


class Config(ExecutorConfig):
    """One Slurm cluster.

    Args:
        partition, account, qos, reservation: None leaves the cluster's default.
        constraint: features of the nodes, as "a100&nvlink".
        gpu_type: as in gres.conf; None takes any.
        modules: environment modules, loaded in this order.
        setup: shell lines that run on the job's first host before everything else.
        python: the interpreter on the nodes; None means this one's path.
        container: a command that the ranks' command is appended to: [apptainer, exec, --nv, IMAGE].
        options: further options of sbatch, as --exclusive or -A account.
        srun_options: further options of srun, as --cpu-bind=cores.
        processes_per_host: for stages that run on several processes; one for each GPU, or one.
        max_array_tasks: tasks of a job array that run at once; None: as many as fit.
        walltime_minutes: of stages that ask for none, and the limit of a group's job; None leaves
            the partition's default.
        warning_seconds: this long before the end of its time a job saves and stops by itself.
        rendezvous_seconds: how long the ranks of a job wait for each other at its start.
        rendezvous_address: by which ranks reach each other, where it is not the node's name: a
            network interface (ib0), or a pattern with NODE for that name (NODEi, ic-NODE).
        fabrics: which nodes share a fast network, by its name, as {ib: "gpu[01-08]"}: their ranks
            are in a row, so that few messages go from one fabric to another.
        between_fabrics: the link between them, for `plan --fit`, which expects hosts of all.
        doctor_wait_seconds: how long the job of `redco-flow doctor` waits in the queue.
        gpu_option: how GPUs are requested; with gpus-per-task each process sees only its own.
        memory_option: how memory_gib is requested; mem-per-cpu divides it by cpus_per_host,
            mem-per-gpu by gpus_per_host (of a stage without GPUs by cpus_per_host).
        omit_nodes: leave --nodes and --ntasks-per-node out where a stage is one process, for sites
            that refuse them on shared nodes.
        launcher: what the job of `launcher: slurm` asks for.
    """

    runs_arrays: ClassVar[bool] = True
    runs_groups: ClassVar[bool] = True
    gives_requested_gpus: ClassVar[bool] = True
    drives_runs: ClassVar[bool] = True
    tells_starts: ClassVar[bool] = True

    partition: SlurmName | None = None
    account: SlurmName | None = None
    qos: SlurmName | None = None
    reservation: SlurmName | None = None
    constraint: Line | None = None
    gpu_type: SlurmName | None = None
    modules: list[SlurmName] = Field(default_factory=list)
    setup: list[Line] = Field(default_factory=list)
    python: Line | None = None
    container: list[Line] = Field(default_factory=list)
    options: SbatchOptions = Field(default_factory=list)
    srun_options: list[Annotated[Line, AfterValidator(_long_option)]] = Field(default_factory=list)
    max_array_tasks: PositiveInt | None = None
    warning_seconds: PositiveInt = 120
    rendezvous_seconds: PositiveInt = 300
    rendezvous_address: SlurmName | None = None
    fabrics: dict[Name, Line] = Field(default_factory=dict)
    between_fabrics: BetweenFabrics | None = None
    doctor_wait_seconds: PositiveInt = 120
    gpu_option: Literal["gpus-per-node", "gres", "gpus-per-task"] = "gpus-per-node"
    memory_option: Literal["mem", "mem-per-cpu", "mem-per-gpu"] = "mem"
    omit_nodes: bool = False
    launcher: LauncherConfig = LauncherConfig()

    @field_validator("launcher")
    @classmethod
    def _check_walltime(cls, launcher: LauncherConfig, info: ValidationInfo) -> LauncherConfig:
        warning_seconds = info.data.get("warning_seconds", 0)
        if problem := _launcher_walltime_problem(launcher.walltime_minutes, warning_seconds):
            raise ValueError(problem)
        return launcher

    @field_validator("fabrics")
    @classmethod
    def _check_fabrics(cls, fabrics: dict[str, str]) -> dict[str, str]:
        counts = Counter(node for nodes in fabrics.values() for node in expand_nodes(nodes))
        if repeated := [node for node, count in counts.items() if count > 1]:
            raise ValueError(f"{', '.join(repeated)} is in more than one fabric")
        return fabrics

    @field_validator("between_fabrics")
    @classmethod
    def _check_between(cls, link: BetweenFabrics | None, info: ValidationInfo) -> object:
        if link is not None and not info.data.get("fabrics", True):
            raise ValueError("is of no use without fabrics: name the nodes of each")
        return link

    def fabrics_of(self, resources: JobResources) -> tuple[list[int], BetweenFabrics] | None:
        """As of `ExecutorConfig`; Slurm chooses the nodes: as many of each fabric are assumed."""
        numbers = _spread(
            [len(expand_nodes(nodes)) for nodes in self.fabrics.values()], resources.num_hosts
        )
        if self.between_fabrics is None or len(numbers) < 2:
            return None
        return numbers, self.between_fabrics

    def check_fits(self, resources: JobResources) -> None:
        """Raise where the options of the profile cannot request these resources.

        Raises:
            DoesNotFit: says why, and what to change.
        """
        if "clusters" in self._given():  # in the record of a run of an earlier version
            raise DoesNotFit(f"slurm.options: --clusters: {_REFUSED['clusters']}.")
        processes, gpus = resources.processes_per_host, resources.gpus_per_host
        if self.gpu_option == "gpus-per-task" and gpus % processes:
            raise DoesNotFit(
                f"{processes} processes per host cannot share {gpus} GPUs evenly, as "
                f"slurm.gpu_option gpus-per-task needs: let slurm.processes_per_host divide "
                f"gpus_per_host."
            )
        is_divided_by_cpus = self.memory_option != "mem" and not self.divides_memory_by_gpus(gpus)
        if resources.memory_gib and is_divided_by_cpus and resources.cpus_per_host is None:
            raise DoesNotFit(
                f"slurm.memory_option is {self.memory_option}, and the stage has memory_gib but no "
                f"cpus_per_host to divide it by: set resources.cpus_per_host."
            )

    def divides_memory_by_gpus(self, gpus_per_host: int) -> bool:
        """Whether a stage's memory is requested for each of its GPUs."""
        return self.memory_option == "mem-per-gpu" and gpus_per_host > 0

    def for_launcher(self) -> tuple[Config, JobResources]:
        """Return the section as it is for the job that drives a run, and what the job asks for.

        Raises:
            DoesNotFit: the section's walltime, which the job would get, is too short.
        """
        from redco_flow.launch.call import JobResources

        own = self.launcher.model_dump(exclude_none=True, exclude={"memory_gib"})
        # The login node's interpreter, without what ranks run under.
        own |= {"container": [], "srun_options": [], "gpu_type": None}
        section = self.model_copy(update=own | ({"python": None} if self.container else {}))
        minutes = section.walltime_minutes
        if problem := _launcher_walltime_problem(minutes, self.warning_seconds):
            raise DoesNotFit(f"the job of slurm.launcher: {problem}.")
        return section, JobResources(
            cpus_per_host=1,
            memory_gib=self.launcher.memory_gib,
            walltime_minutes=minutes,
        )

    @property
    def seconds_of_warning(self) -> int:
        """Seconds between Slurm's warning of a job and the end of its walltime."""
        return self.warning_seconds

    def compare_with_site(
        self, resources: JobResources, environ: Mapping[str, str]
    ) -> tuple[list[tuple[tuple[str, ...], str]], list[str]]:
        """As `ExecutorConfig`: with the limits that `scontrol` and `sacctmgr` show.

        Where the site's plugins may change a request at its submission, all are notes.
        """
        from redco_flow.launch.slurm.limits import ask_site

        site, request = ask_site(environ), self.request(resources)
        notes = [f"limits of the Slurm site that are not checked: {one}" for one in site.unknown]
        if note := site.array_note(request):
            notes.append(note)
        problems = site.problems(request)
        if not site.submit_plugins:
            return problems, notes
        changes = f"unless the site's {site.submit_plugins} changes the request"
        return [], [*notes, *(f"{'.'.join(path)}: {text} ({changes})" for path, text in problems)]

    def request(self, resources: JobResources) -> JobRequest:
        """Return a job's request with what chooses its limits; `options` come last, and win."""
        from redco_flow.launch.slurm.limits import JobRequest, parse_minutes

        given = self._given()
        if time := given.get("time"):
            resources = replace(resources, walltime_minutes=parse_minutes(time))
        unchecked = (_DECIDES[name] for name in given if name in _DECIDES)
        return JobRequest(
            resources,
            partition=given.get("partition") or self.partition or "",
            account=given.get("account") or self.account or "",
            qos=given.get("qos") or self.qos or "",
            gpu_type=self.gpu_type or "",
            unchecked=frozenset().union(*unchecked),
        )

    def _given(self) -> dict[str, str]:
        """Return the values of those `options` that concern limits, by their full names."""
        found = {}
        words = [word for option in self.options for word in re.split(r"[\s='\"]+", option)]
        for word, value in itertools.pairwise([*words, ""]):
            if word.startswith("--"):
                for name in _full_names(word[2:]):
                    found[name] = value
            elif word[:1] == "-" and word[1:2] in _SHORT_OPTIONS:
                found[_SHORT_OPTIONS[word[1]]] = word[2:] or value
        return found


def _spread(sizes: Sequence[int], num_hosts: int) -> list[int]:
    """Return as many hosts of each fabric as of the others, as far as it has them."""
    numbers = [0] * len(sizes)
    for _ in range(min(num_hosts, sum(sizes))):
        free = (place for place, size in enumerate(sizes) if numbers[place] < size)
        numbers[min(free, key=numbers.__getitem__)] += 1
    return [number for number in (*numbers, num_hosts - sum(numbers)) if number]


def _launcher_walltime_problem(minutes: int | None, warning_seconds: int) -> str | None:
    """Say why a job that drives a run cannot have this time; None where it can."""
    least = warning_seconds + _MIN_SECONDS_OF_LAUNCHER
    if minutes is None or minutes * 60 >= least:
        return None
    return (
        f"walltime_minutes is {minutes}, but the job is warned {warning_seconds} s "
        f"(slurm.warning_seconds) before its end and then queued again: set "
        f"launcher.walltime_minutes to {math.ceil(least / 60)} or more, better to a day"
    )


def _full_names(given: str) -> list[str]:
    """Return the options that sbatch takes an abbreviation for."""
    if given in _CONCERN_LIMITS:
        return [given]
    return [name for name in _CONCERN_LIMITS if given and name.startswith(given)]
