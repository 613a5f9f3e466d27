"""The `xmanager:` section of a profile: which of XManager's backends gets the jobs, and with what.

What a stage asks for (GPUs, memory, time) is the pipeline's. Of a secret only its name stands here.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, StringConstraints, model_validator

from redco_flow.spec.model import PositiveInt, StrictModel, Text


def _one_line(text: str) -> str:
    if not text.isprintable():
        raise ValueError("must be one line without control characters")
    return text


Line = Annotated[Text, AfterValidator(_one_line)]
ObjectName = Annotated[
    str, StringConstraints(pattern=r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$", max_length=63)
]
"""The name of a Kubernetes object: lower case, digits, '-' and '.'."""
EntryName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]+$", max_length=253)]
ImageName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.:/@-]*$")]
VariableName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]

ProjectName = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9-]*$", max_length=63)]
RegionName = Annotated[str, StringConstraints(pattern=r"^[a-z]+-[a-z]+[0-9]+$")]
MachineName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]+(-[a-z0-9]+)+$")]
AcceleratorName = Annotated[str, StringConstraints(pattern=r"^[A-Z][A-Z0-9_]*$")]

_NEEDED = {
    "kubernetes": ("image", "volume_claim"),
    "vertex": ("project", "image", "machine_type", "nfs_server", "nfs_path", "network"),
    "containers": ("image",),
}


class StoredVariable(StrictModel):
    """A variable whose value the cluster keeps.

    Args:
        object: the name of a Kubernetes Secret.
        entry: the key in it.
    """

    variable: VariableName
    object: ObjectName
    entry: EntryName


class KubernetesSection(StrictModel):
    """What a job on Kubernetes is made of.

    Args:
        image: with Python and the packages installed.
        python: the interpreter in the image.
        namespace: where the objects are made.
        volume_claim: of a volume that many pods can write; mounted at the workspace's path.
        stored_variables: that pods get from Secrets; the values never pass through here.
        service_account: None leaves the namespace's default.
        port: of rank 0, for the other ranks.
    """

    image: ImageName | None = None
    python: Line = "python"
    namespace: ObjectName = "default"
    volume_claim: ObjectName | None = None
    stored_variables: list[StoredVariable] = Field(default_factory=list)
    service_account: ObjectName | None = None
    port: Annotated[PositiveInt, Field(le=65535)] = 8476


class StoredSecret(StrictModel):
    """A variable whose value Google's Secret Manager keeps.

    Args:
        secret: a version's whole name; read by the job, with its service account.
    """

    variable: VariableName
    secret: Annotated[
        str, StringConstraints(pattern=r"^projects/[a-z0-9-]+/secrets/[\w-]+/versions/[a-z0-9]+$")
    ]


class VertexSection(StrictModel):
    """What a custom job on Vertex AI is made of.

    Args:
        project, region: where the job is made.
        image: with Python and the packages installed.
        python: the interpreter in the image.
        machine_type: of every host; decides its CPUs and memory.
        accelerator_type: None for machines without, or that have theirs built in.
        nfs_server, nfs_path: a share that every host mounts at the workspace's path.
        network: that hosts and the share are in: projects/NUMBER/global/networks/NAME.
        service_account: None leaves the project's default.
        stored_variables: that jobs get from Secret Manager; the values never pass through here.
    """

    project: ProjectName | None = None
    region: RegionName = "us-central1"
    image: ImageName | None = None
    python: Line = "python"
    machine_type: MachineName | None = None
    accelerator_type: AcceleratorName | None = None
    nfs_server: Line | None = None
    nfs_path: Line | None = None
    network: Line | None = None
    service_account: Line | None = None
    stored_variables: list[StoredSecret] = Field(default_factory=list)


class ContainersSection(StrictModel):
    """What the containers of a job on this machine are made of.

    Args:
        image: with Python and the packages installed.
        python: the interpreter in the image.
        passed_variables: names of variables that containers get with the value that they have
            in the shell that starts them.
    """

    image: ImageName | None = None
    python: Line = "python"
    passed_variables: list[VariableName] = Field(default_factory=list)


class XManagerSection(StrictModel):
    """One backend of XManager.

    Args:
        backend: local runs the jobs on this machine; the others are shown by `plan --render` only.
        processes_per_host: for stages that run on several processes; one for each GPU, or one.
        walltime_minutes: of stages that ask for none; None is unlimited.
        rendezvous_seconds: how long the ranks of a job wait for each other at its start.
        kubernetes, vertex, containers: each read where it is the backend.
    """

    backend: Literal["local", "kubernetes", "vertex", "containers"] = "local"
    processes_per_host: PositiveInt = 1
    walltime_minutes: PositiveInt | None = None
    rendezvous_seconds: PositiveInt = 300
    kubernetes: KubernetesSection = KubernetesSection()
    vertex: VertexSection = VertexSection()
    containers: ContainersSection = ContainersSection()

    @model_validator(mode="after")
    def _check_backend(self) -> XManagerSection:
        if self.backend == "local":
            return self
        section = getattr(self, self.backend)
        if missing := [name for name in _NEEDED[self.backend] if getattr(section, name) is None]:
            raise ValueError(f"backend '{self.backend}' needs {self.backend}.{', '.join(missing)}")
        return self
