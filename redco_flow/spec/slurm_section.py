"""The `slurm:` section of a profile: what one cluster wants of every job.

What a stage asks for (hosts, memory, time) is the pipeline's. `setup` and `options` are the
operator's own shell and Slurm text and are taken as they are, but one line each: a line break in
them would be a second command.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, StringConstraints

from redco_flow.spec.model import NonNegativeInt, PositiveInt, StrictModel, Text


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
