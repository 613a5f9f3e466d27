"""Predict how long a collective of a compiled program takes, and by which link.

Devices of a host have links among each other, hosts a network, and groups of hosts, whose networks
may be of different kinds, something slower between them (Holmes, arXiv 2312.03549). Times are those
of NCCL's rings; in an all-to-all each device sends its parts itself.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from redco_flow.engine.devices import Device
from redco_flow.engine.errors import EngineError
from redco_flow.engine.step.program import Computation, Instruction, Program, array_bytes

COLLECTIVES = (
    "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute",
)  # fmt: skip
_PAIR = re.compile(r"\{(\d+),(\d+)\}")
_COUNTED_GROUPS = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH_GROUPS = re.compile(
    r"replica_groups=mesh\[([^\]]*)\]"
    r"(?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{([^}]*)\}"
)
_MESH_AXIS = re.compile(r"'([^']+)'=(\d+)")
_MESH_AXIS_USE = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?")
HOST, NETWORK, BETWEEN = "in a host", "between hosts", "between fabrics"
# Seconds of a collective, and of each of its ring's turns. Source: NCCL, src/graph/tuning.cc, ring,
# protocol LL.
_SECONDS_OF_COLLECTIVE = 6.6e-6
_SECONDS_OF_TURN = {HOST: 0.6e-6, NETWORK: 2.7e-6}


class NotPredicted(EngineError):
    """A step's time cannot be predicted; the message says why."""


@dataclass(frozen=True)
class Fabrics:
    """Groups of hosts, each with a network of its own.

    Args:
        of_host: the number of each host's group.
        between_gb_s: GB/s that a host sends to hosts of other groups, one way.
        latency_us: microseconds until the first byte is there.
    """

    of_host: Sequence[int]
    between_gb_s: float
    latency_us: float


@dataclass(frozen=True)
class Sending:
    """The cost of one collective.

    Args:
        link: the one that it waits for.
        num_bytes: that a device sends by all links.
        groups: of partitions that exchange with each other.
    """

    seconds: float
    link: str
    num_bytes: float
    groups: Sequence[Sequence[int]]


@dataclass(frozen=True)
class Figures:
    """The figures of a device.

    Args:
        used: names of those that were asked for.
    """

    device: Device
    used: dict[str, None] = field(default_factory=dict)

    def attained(self, fact: str, share: float, usual_share: float, what: str) -> float:
        """Return a share of one of the device's figures.

        Args:
            usual_share: what a measured figure is of that of the data sheet.
            what: the figure, for people.

        Raises:
            NotPredicted: it is not known.
        """
        measured = self.device.measured.get(fact)
        known = getattr(self.device, fact, None) if measured is None else measured / usual_share
        if known is None:
            raise NotPredicted(f"the speed of {what} is not known")
        self.used[fact] = None
        return share * float(known)


@dataclass(frozen=True)
class Links:
    """The links of a program's devices.

    Args:
        hosts: of each partition of the program, the number of its host.
        share: of a link's speed that collectives attain.
        fabrics: None: all hosts have one network.
        usual_share: what a measured speed is of a link's.
    """

    figures: Figures
    hosts: Sequence[int]
    share: float
    fabrics: Fabrics | None = None
    usual_share: float = 1.0

    def send(self, kind: str, computation: Computation, one: Instruction) -> Sending:
        """Return the cost of a collective, its start included where it has one.

        Raises:
            NotPredicted: its devices, or the speed of a link that it needs, are not known.
        """
        groups = groups_of(one.text, len(self.hosts))
        size = max(map(len, groups))
        if size == 1:
            return Sending(0.0, HOST, 0.0, groups)
        operands = (computation.instructions[name].result for name in one.operands)
        num_bytes = sum(map(array_bytes, operands))
        turns = {"all-reduce": 2 * (size - 1), "collective-permute": 1}.get(kind, size - 1)
        each_turn = num_bytes if kind in ("all-gather", "collective-permute") else num_bytes / size
        longest, slowest = 0.0, HOST
        for link, part in self._parts(kind, size, groups).items():
            sending = each_turn * part / (self._gb_s(link) * 1e9)
            seconds = turns * (sending + self._seconds_of_turn(link))
            if seconds > longest:
                longest, slowest = seconds, link
        return Sending(_SECONDS_OF_COLLECTIVE + longest, slowest, turns * each_turn, groups)

    def _parts(self, kind: str, size: int, groups: Sequence[Sequence[int]]) -> dict[str, float]:
        """Return the links that a collective uses, and how much of a turn's bytes each carries.

        Links in and between hosts are a device's own, a link between fabrics is its host's.
        """
        in_hosts = [Counter(self.hosts[number] for number in group) for group in groups]
        members = min(min(each.values()) for each in in_hosts)
        in_fabrics = [Counter(self._fabric(number) for number in group) for group in groups]
        hosts_of_fabric = max(
            max(Counter(self._fabric_of_host(host) for host in each).values()) for each in in_hosts
        )
        # Of a ring's members in one host each sends a part of what goes to other hosts.
        to_host, to_network = 1.0, 1 / members
        if kind == "all-to-all":
            near = max(max(each.values()) for each in in_fabrics)
            to_host, to_network = (members - 1) / (size - 1), (near - members) / (size - 1)
        found = {}
        if max(max(each.values()) for each in in_hosts) > 1:
            found[HOST] = to_host
        if hosts_of_fabric > 1:
            found[NETWORK] = to_network
        if across := self._sent_between_fabrics(kind, groups):
            found[BETWEEN] = across
        return found

    def _sent_between_fabrics(self, kind: str, groups: Sequence[Sequence[int]]) -> float:
        """Return how often a turn's bytes leave the busiest host for another fabric."""
        if self.fabrics is None:
            return 0.0
        sent: defaultdict[int, float] = defaultdict(float)
        for group in groups:
            fabrics = Counter(self._fabric(number) for number in group)
            if len(fabrics) == 1:
                continue
            if kind == "all-to-all":
                for number in group:
                    others = len(group) - fabrics[self._fabric(number)]
                    sent[self.hosts[number]] += others / (len(group) - 1)
            elif kind == "collective-permute":
                sent[self.hosts[group[0]]] += 1
            else:
                for host in {self.hosts[number] for number in group}:
                    sent[host] += 1
        return max(sent.values(), default=0)

    def _fabric(self, number: int) -> int:
        return self._fabric_of_host(self.hosts[number])

    def _fabric_of_host(self, host: int) -> int:
        return 0 if self.fabrics is None else self.fabrics.of_host[host]

    def _gb_s(self, link: str) -> float:
        if link == BETWEEN and self.fabrics is not None:
            return self.share * self.fabrics.between_gb_s
        fact, others = "network_gb_s", "other hosts"
        if link == HOST:
            fact, others = "host_gb_s", "other devices of its host"
        what = f"the link of {self.figures.device.kind} to {others}"
        return self.figures.attained(fact, self.share, self.usual_share, what)

    def _seconds_of_turn(self, link: str) -> float:
        if link == BETWEEN and self.fabrics is not None:
            return self.fabrics.latency_us * 1e-6
        return _SECONDS_OF_TURN[link]


@dataclass
class Traffic:
    """The cost of the collectives along some axes of a mesh in one run of a program.

    Args:
        axes: as `fsdp`, or `data and fsdp` where one collective goes over both.
        link: the slowest one that they use.
        bytes_per_device: that each device sends.
        seconds: on the link, hidden behind kernels or not.
    """

    axes: str
    link: str
    bytes_per_device: float = 0.0
    seconds: float = 0.0


def find_traffic(program: Program, links: Links, mesh: Mapping[str, int]) -> list[Traffic]:
    """Return what is sent along each axis of a mesh, the one that takes longest first.

    Args:
        mesh: the size of each axis; the program's partitions are in the order of the mesh.

    Raises:
        NotPredicted: as `Links.send`; or a loop's turns are not known.
    """
    names, places = list(mesh), np.indices(tuple(mesh.values())).reshape(len(mesh), -1)
    found: dict[tuple[str, str], Traffic] = {}
    for computation, one, count in program.runs():
        kind, phase = kind_and_phase(one.operation)
        if kind not in COLLECTIVES or phase == "done":
            continue
        if count is None:
            raise NotPredicted(f"{one.name} is in a loop of unknown length")
        sending = links.send(kind, computation, one)
        varies = [any(len({*row[group]}) > 1 for group in sending.groups) for row in places]
        axes = " and ".join(name for name, used in zip(names, varies, strict=True) if used)
        if axes and sending.num_bytes:
            each = found.setdefault((axes, sending.link), Traffic(axes, sending.link))
            each.bytes_per_device += count * sending.num_bytes
            each.seconds += count * sending.seconds
    return sorted(found.values(), key=lambda one: one.seconds, reverse=True)


def kind_and_phase(operation: str) -> tuple[str, str]:
    """Return an operation without `-start` or `-done`, and which of these it had."""
    for phase in ("start", "done"):
        if operation.endswith(f"-{phase}"):
            return operation.removesuffix(f"-{phase}"), phase
    return operation, ""


def groups_of(text: str, num_devices: int) -> list[list[int]]:
    """Return the groups of partitions that exchange with each other, by all notations of HLO.

    Raises:
        NotPredicted: the text has none.
    """
    if "source_target_pairs=" in text:
        pairs = text.partition("source_target_pairs={")[2].partition("}}")[0] + "}"
        moving = [[int(a), int(b)] for a, b in _PAIR.findall(pairs) if a != b]
        return moving or [[0]]
    if counted := _COUNTED_GROUPS.search(text):
        return _rows(_order(num_devices, counted[3], counted[4]), int(counted[2]))
    if mesh := _MESH_GROUPS.search(text):
        return _groups_of_mesh(mesh[1], mesh[4], _order(num_devices, mesh[2], mesh[3]))
    listed = re.search(r"replica_groups=\{((?:\{[\d,]+\},?)*)\}", text)
    if listed is None:
        raise NotPredicted(f"the devices of a collective are not known: {text[:100]}")
    found = [_numbers(group) for group in re.findall(r"\{([\d,]+)\}", listed[1])]
    return found or [list(range(num_devices))]


def _order(num_devices: int, shape: str | None, transposed: str | None) -> np.ndarray:
    """Return partitions in the order of `[shape]T(transposed)`."""
    order = np.arange(num_devices)
    order = order.reshape(_numbers(shape)) if shape else order
    return order.transpose(_numbers(transposed)) if transposed else order


def _groups_of_mesh(axes: str, used: str, devices: np.ndarray) -> list[list[int]]:
    """Return the groups along axes of a mesh; an axis may be used in part: 'axis':(skipped)used."""
    parts = {
        name: (int(skipped), int(size))
        for name, skipped, size in _MESH_AXIS_USE.findall(used)
        if size
    }
    names = [name for name, _, _ in _MESH_AXIS_USE.findall(used)]
    shape: list[int] = []
    places = {}
    for name, size in _MESH_AXIS.findall(axes):
        skipped, part = parts.get(name, (1, int(size)))
        places[name] = len(shape) + 1
        shape += [skipped, part, int(size) // skipped // part]
    order = devices.reshape(shape)
    along = [places[name] for name in names]
    order = np.moveaxis(order, along, range(-len(along), 0))
    return _rows(order, math.prod(shape[place] for place in along))


def _rows(order: np.ndarray, size: int) -> list[list[int]]:
    rows: list[list[int]] = order.reshape(-1, size).tolist()
    return rows


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]
