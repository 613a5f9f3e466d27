"""The `hosts:` section of a profile, and which of its hosts a job can use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import Field, model_validator

from redco_flow.errors import DoesNotFit
from redco_flow.launch.config import BetweenFabrics, ExecutorConfig
from redco_flow.spec.model import (
    Name,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    VariableName,
)
from redco_flow.spec.ssh import HostPath, LocalFile, SshTarget

if TYPE_CHECKING:
    from redco_flow.launch.call import JobResources


class Host(SshTarget):
    """One machine.

    Args:
        gpus: how many a stage may ask of it.
        directory: where code, inputs and results lie on it; made if missing.
        fabric: machines of one name share a fast network.
    """

    gpus: NonNegativeInt = 0
    directory: HostPath = "~/.redco-flow"
    fabric: Name | None = None


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
        between_fabrics: the link between machines of different fabrics; a stage gets some of each
            where no fabric has enough. None: it never does.
        rendezvous_seconds: how long the ranks of a job wait for each other at its start.
        lost_after_minutes: a machine that has been silent for so long counts as lost.
    """

    addresses: list[Host] = Field(default_factory=list)
    python: HostPath = "/usr/bin/python3"
    known_hosts: LocalFile | None = None
    shared_workspace: bool | None = None
    forward_environment: list[VariableName] = Field(default_factory=list)
    between_fabrics: BetweenFabrics | None = None
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

    def num_gpus_of_host(self, environ: Mapping[str, str]) -> int | None:
        """Return how many GPUs each host has, which are all visible to a job; None if they differ.

        Hosts without `gpus` may have some that the profile does not name.
        """
        numbers = {host.gpus for host in self.addresses}
        return numbers.pop() or None if len(numbers) == 1 else None

    def fabrics_of(self, resources: JobResources) -> tuple[list[int], BetweenFabrics] | None:
        """As of `ExecutorConfig`, if no host is busy."""
        hosts = eligible_hosts(self, resources)[0][: resources.num_hosts]
        numbers = list(Counter(host.fabric for host in hosts).values())
        if self.between_fabrics is None or len(numbers) == 1:
            return None
        return numbers, self.between_fabrics


def eligible_hosts(settings: Config, resources: JobResources) -> list[list[Host]]:
    """Return the groups of hosts that are large enough, one for each fabric, best first.

    Where none is, and `between_fabrics` allows it: one of all hosts, those of a fabric together, so
    that an axis of the mesh that sends little crosses the slow link alone.

    Raises:
        DoesNotFit: no group is, even when none is in use.
    """
    groups: dict[str | None, list[Host]] = {}
    for host in settings.addresses:
        if host.gpus >= resources.gpus_per_host:
            groups.setdefault(host.fabric, []).append(host)
    fitting = [group for group in groups.values() if len(group) >= resources.num_hosts]
    every = [host for group in groups.values() for host in group]
    if not fitting and settings.between_fabrics and len(every) >= resources.num_hosts:
        return [every]
    if not fitting:
        largest = max((len(group) for group in groups.values()), default=0)
        with_gpus = f" with {resources.gpus_per_host} GPUs" if resources.gpus_per_host else ""
        advice = "ask for less (resources), or add hosts"
        if len(every) >= resources.num_hosts:
            advice += "; hosts.between_fabrics allows a stage on several fabrics"
        raise DoesNotFit(
            f"the stage asks for {resources.num_hosts} hosts{with_gpus}, and the profile's largest "
            f"group (hosts.addresses, one fabric) has {largest}: {advice}."
        )
    return fitting
