"""The sections of a profile for its executors: `slurm`, `hosts` and `xmanager`.

What a stage asks for (hosts, memory, time) is the pipeline's. Slurm's `setup` and `options` are the
operator's own shell and Slurm text and are taken as they are, but one line each: a line break in
them would be a second command.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, StringConstraints, model_validator

from redco_flow.spec.model import Name, NonNegativeInt, PositiveInt, StrictModel, Text


def _one_line(text: str) -> str:
    if not text.isprintable():
        raise ValueError("must be one line without control characters")
    return text


def _option(text: str) -> str:
    if not text.startswith("--"):
        raise ValueError("must be a long option of sbatch, such as --exclusive")
    return text


Line = Annotated[Text, AfterValidator(_one_line)]
SlurmName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.,+:/-]*$")]
"""A name that the cluster's administrator chose: a partition, an account, a QOS."""


class SlurmSection(StrictModel):
    """One Slurm cluster.

    Args:
        partition, account, qos, reservation: None leaves the cluster's default.
        constraint: features of the nodes, as "a100&nvlink".
        gpu_type: as in gres.conf; None takes any.
        modules: environment modules, loaded in this order.
        setup: shell lines that run on the job's first host before everything else.
        python: the interpreter on the nodes; None means this one's path.
        container: a command that the ranks' command is appended to: [apptainer, exec, --nv, IMAGE].
        options: further options of sbatch, as --exclusive.
        srun_options: further options of srun, as --cpu-bind=cores.
        processes_per_host: for stages that run on several processes; one for each GPU, or one.
        max_array_tasks: of a stage cut into shards, so many run at once; None: all that find room.
        walltime_minutes: of stages that ask for none; None leaves the partition's default.
        warning_seconds: this long before the end of its time a job saves and stops by itself.
        rendezvous_seconds: how long the ranks of a job wait for each other at its start.
        gpu_option: how GPUs are asked for.
    """

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
    options: list[Annotated[Line, AfterValidator(_option)]] = Field(default_factory=list)
    srun_options: list[Annotated[Line, AfterValidator(_option)]] = Field(default_factory=list)
    processes_per_host: PositiveInt = 1
    max_array_tasks: PositiveInt | None = None
    walltime_minutes: PositiveInt | None = None
    warning_seconds: PositiveInt = 120
    rendezvous_seconds: PositiveInt = 300
    gpu_option: Literal["gpus-per-node", "gres"] = "gpus-per-node"


class RetryBudgets(StrictModel):
    """How often the orchestrator tries a stage again, by the cause of the last attempt's end.

    Each retry is a new attempt that goes on from the last checkpoint. What Slurm requeues by
    itself (a preemption, a dead node) stays one attempt and costs nothing here.

    Args:
        preempted: None is unlimited.
        node_failure: a host of the job died, or could not be reached any more.
        timeout: the job's time was over.
        stalled: a process reported no progress for stall_timeout_minutes.
        out_of_memory: the cluster ended a process for want of memory.
        failed: any other end; also of a process that was killed for want of memory perhaps, but
            not surely.
    """

    preempted: NonNegativeInt | None = None
    node_failure: NonNegativeInt = 3
    timeout: NonNegativeInt = 10
    stalled: NonNegativeInt = 0
    failed: NonNegativeInt = 0
    out_of_memory: NonNegativeInt = 0

    def allows(self, cause: str, num_ended: int) -> bool:
        """Say whether to try again after `num_ended` attempts that ended by this cause."""
        if cause not in type(self).model_fields:
            return False
        budget = getattr(self, cause)
        return budget is None or num_ended <= budget


def _expanded(text: str) -> str:
    return str(Path(text).expanduser())


def _on_a_host(text: str) -> str:
    if not text.startswith(("/", "~/")):
        raise ValueError("must begin with / or ~/ (the home directory on the host)")
    if ".." in Path(text).parts:
        raise ValueError("must not hold '..'")
    return text


HostAddress = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.:-]*$")]
"""A DNS name, an IP address, or an alias of ~/.ssh/config."""
UserName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.@-]*$")]
JumpHost = Annotated[
    str,
    StringConstraints(
        pattern=r"^([A-Za-z0-9_][A-Za-z0-9_.-]*@)?[A-Za-z0-9][A-Za-z0-9_.-]*(:[0-9]{1,5})?$"
    ),
]
"""`[user@]host[:port]`, through which a host is reached."""
LocalFile = Annotated[Line, AfterValidator(_expanded)]
HostPath = Annotated[Line, AfterValidator(_on_a_host)]
VariableName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


class Host(StrictModel):
    """One machine.

    Args:
        address: a host name or an IP address.
        user, port: None leaves them to ~/.ssh/config, then to SSH's own defaults.
        key: a private key's file on this machine; None takes the agent's and SSH's default files.
        jump_host: `[USER@]HOST[:PORT]` through which it is reached.
        gpus: how many a stage may ask of it.
        directory: where code, inputs and results lie on it; made if missing.
        fabric: machines of one name share a fast network; a group never mixes two.
    """

    address: HostAddress
    user: UserName | None = None
    port: Annotated[PositiveInt, Field(le=65535)] | None = None
    key: LocalFile | None = None
    jump_host: JumpHost | None = None
    gpus: NonNegativeInt = 0
    directory: HostPath = "~/.redco-flow"
    fabric: Name | None = None

    @property
    def label(self) -> str:
        """The host in messages and records: the address, with its port where one is given."""
        return self.address if self.port is None else f"{self.address}:{self.port}"


class HostsSection(StrictModel):
    """The machines of a profile.

    Args:
        addresses: the machines, best first.
        python: the interpreter on the machines, with the packages installed.
        known_hosts: keys of the machines; None takes ~/.ssh/known_hosts. No other is accepted.
        shared_workspace: whether the machines see the workspace under this machine's path; None
            finds out. What is not shared is copied, and the results copied back.
        forward_environment: variables of this machine whose values the stages get, secrets too:
            they go through SSH and are written nowhere.
        processes_per_host: for stages that run on several processes; one for each GPU, or one.
        walltime_minutes: of stages that ask for none; None is unlimited.
        rendezvous_seconds: how long the ranks of a job wait for each other at its start.
        lost_after_minutes: a machine that has been silent for so long counts as lost.
        keep_days: what a machine has only copies of is removed there once it was last used so long
            ago, when a job starts; 0 is never.
    """

    addresses: list[Host] = Field(default_factory=list)
    python: HostPath = "/usr/bin/python3"
    known_hosts: LocalFile | None = None
    shared_workspace: bool | None = None
    forward_environment: list[VariableName] = Field(default_factory=list)
    processes_per_host: PositiveInt = 1
    walltime_minutes: PositiveInt | None = None
    rendezvous_seconds: PositiveInt = 300
    lost_after_minutes: PositiveInt = 15
    keep_days: NonNegativeInt = 14

    @model_validator(mode="after")
    def _check_distinct(self) -> HostsSection:
        counts = Counter(host.label for host in self.addresses)
        if repeated := [label for label, count in counts.items() if count > 1]:
            raise ValueError(f"addresses has {', '.join(repeated)} more than once")
        return self


class XManagerSection(StrictModel):
    """One backend of XManager.

    Args:
        backend: local runs the jobs on this machine.
        processes_per_host: for stages that run on several processes; one for each GPU, or one.
        walltime_minutes: of stages that ask for none; None is unlimited.
        rendezvous_seconds: how long the ranks of a job wait for each other at its start.
    """

    backend: Literal["local"] = "local"
    processes_per_host: PositiveInt = 1
    walltime_minutes: PositiveInt | None = None
    rendezvous_seconds: PositiveInt = 300
