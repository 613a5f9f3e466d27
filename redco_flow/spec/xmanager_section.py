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


class XManagerSection(StrictModel):
    """One backend of XManager.

    Args:
        backend: local runs the jobs on this machine; kubernetes is shown by `plan --render` only.
        processes_per_host: for stages that run on several processes; one for each GPU, or one.
        walltime_minutes: of stages that ask for none; None is unlimited.
        rendezvous_seconds: how long the ranks of a job wait for each other at its start.
        kubernetes: read where the backend is kubernetes.
    """

    backend: Literal["local", "kubernetes"] = "local"
    processes_per_host: PositiveInt = 1
    walltime_minutes: PositiveInt | None = None
    rendezvous_seconds: PositiveInt = 300
    kubernetes: KubernetesSection = KubernetesSection()

    @model_validator(mode="after")
    def _check_kubernetes(self) -> XManagerSection:
        if self.backend == "kubernetes":
            asked = {"image": self.kubernetes.image, "volume_claim": self.kubernetes.volume_claim}
            if missing := [name for name, value in asked.items() if value is None]:
                raise ValueError(f"backend 'kubernetes' needs kubernetes.{', '.join(missing)}")
        return self
