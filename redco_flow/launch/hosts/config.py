"""The `hosts:` section of a profile, and which of its hosts a job can use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator, Field, StringConstraints, model_validator

from redco_flow.errors import DoesNotFit
from redco_flow.launch.config import ExecutorConfig, Line
from redco_flow.local_paths import expanded
from redco_flow.spec.model import (
    Name,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    StrictModel,
    VariableName,
)

if TYPE_CHECKING:
    from redco_flow.launch.call import JobResources


def _expanded(text: str) -> str:
    return str(expanded(text))


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


class Config(ExecutorConfig):
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
    """

    addresses: list[Host] = Field(default_factory=list)
    python: HostPath = "/usr/bin/python3"
    known_hosts: LocalFile | None = None
    shared_workspace: bool | None = None
    forward_environment: list[VariableName] = Field(default_factory=list)
    rendezvous_seconds: PositiveInt = 300
    lost_after_minutes: PositiveFloat = 15.0

    @model_validator(mode="after")
    def _check_distinct(self) -> Config:
        counts = Counter(host.label for host in self.addresses)
        if repeated := [label for label, count in counts.items() if count > 1]:
            raise ValueError(f"addresses has {', '.join(repeated)} more than once")
        return self

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Config:
        """Read a job's record; keys that another version had are left out."""
        return super().from_json(
            {name: values[name] for name in cls.model_fields if name in values}
        )

    def check(self) -> None:
        """Raise where there is no host.

        Raises:
            ValueError: says so.
        """
        if not self.addresses:
            raise ValueError("executor 'hosts' needs hosts.addresses: at least one machine")

    def check_fits(self, resources: JobResources) -> None:
        """Raise where no group of hosts is large enough.

        Raises:
            DoesNotFit: says what the largest one has.
        """
        eligible_hosts(self, resources)


def eligible_hosts(settings: Config, resources: JobResources) -> list[list[Host]]:
    """Return the groups of hosts that are large enough, one for each fabric, best first.

    Raises:
        DoesNotFit: no group is, even when none is in use.
    """
    groups: dict[str | None, list[Host]] = {}
    for host in settings.addresses:
        if host.gpus >= resources.gpus_per_host:
            groups.setdefault(host.fabric, []).append(host)
    fitting = [group for group in groups.values() if len(group) >= resources.num_hosts]
    if not fitting:
        largest = max((len(group) for group in groups.values()), default=0)
        with_gpus = f" with {resources.gpus_per_host} GPUs" if resources.gpus_per_host else ""
        raise DoesNotFit(
            f"the stage asks for {resources.num_hosts} hosts{with_gpus}, and the profile's largest "
            f"group (hosts.addresses, one fabric) has {largest}: ask for less (resources), or add "
            f"hosts."
        )
    return fitting
