"""Predict how long a step takes on GPUs, from the text of its compiled program.

The sum over kernels of each kernel's own roofline, which is the longer of computing its products
and of moving its bytes, and of what a launch costs; a loop's kernels as often as it turns. What
collectives send takes its time beside the kernels that are scheduled between start and done; only
the wait that is left counts. What is not known is refused, never guessed.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from redco_flow.engine.devices import Device
from redco_flow.engine.errors import EngineError
from redco_flow.engine.step.program import Computation, Instruction, Program, array_bytes, dims_of

_COLLECTIVES = (
    "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute",
)  # fmt: skip
_NOT_COUNTED = (
    "fft", "cholesky", "triangular-solve", "infeed", "outfeed", "send", "recv", "custom-call",
    "collective-broadcast", "ragged-all-to-all",
)  # fmt: skip
# Custom calls that compute little and are bound by their bytes.
_MOVING_CALLS = ("cu_threefry2x32_ffi", "__cub$DeviceRadixSort")
_TRITON = "__gpu$xla.gpu.triton"
# Of `models.attention.triton_kernels`: how many products each computes of its queries, keys and
# head dim. The causal order shows half of the keys.
_ATTENTION = re.compile(r"\b(flash_[a-z_]+?)(_causal)?\)*/pallas_call")
_ATTENTION_PRODUCTS = {"flash_forward": 2, "flash_query_gradient": 3, "flash_key_gradients": 4}
_PAIR = re.compile(r"\{(\d+),(\d+)\}")
_COUNTED_GROUPS = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH_GROUPS = re.compile(
    r"replica_groups=mesh\[([^\]]*)\]"
    r"(?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{([^}]*)\}"
)
_MESH_AXIS = re.compile(r"'([^']+)'=(\d+)")
_MESH_AXIS_USE = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?")
# Seconds of a collective, and of each of its ring's turns in a host and between hosts. Source:
# NCCL, src/graph/tuning.cc, ring, protocol LL.
_SECONDS_OF_COLLECTIVE = 6.6e-6
_SECONDS_OF_TURN = {"host": 0.6e-6, "network": 2.7e-6}


Spent = dict[str, float]
"""Seconds by what they are spent on."""


class NotPredicted(EngineError):
    """A step's time cannot be predicted; the message says why."""


@dataclass(frozen=True)
class Attained:
    """Shares of a data sheet's figures that kernels attain, and what a launch costs."""

    products: float
    attention: float
    memory: float
    links: float
    launch_seconds: float


# Usual shares, held against steps of LLaMA-3.2-1B and decoding measured on an H200 and an H100
# (docs/benchmarks.md). Attention: FlashAttention's kernels there, heads of 64 dims. Links: 240 of
# 300 GB/s, nccl-tests' bus bandwidth on 8 A100s; not measured with this project. `BEST` has the
# ceilings seen on that H100: a product of 8192³ at 0.80, a copy at 0.90. `WORST` is as far on the
# other side.
USUAL = Attained(0.7, 0.35, 0.8, 0.8, 1.5e-6)
BEST = Attained(0.8, 0.5, 0.9, 0.95, 1e-6)
WORST = Attained(0.6, 0.25, 0.7, 0.6, 3e-6)


@dataclass(frozen=True)
class StepTime:
    """The time of a step in seconds.

    Args:
        seconds: as expected.
        least, most: with what kernels attain at best and at worst.
        parts: of `seconds`: products, attention, other kernels, launches, and waits for
            communication.
        facts: the figures of the device that it was computed with, by their names in `Device`.
    """

    seconds: float
    least: float
    most: float
    parts: Spent
    facts: list[str]


def predict_step_time(program: Program, device: Device, hosts: Sequence[int]) -> StepTime:
    """Predict the time of a program's run.

    Args:
        hosts: of each partition of the program, the number of its host.

    Raises:
        NotPredicted: something in the program, or of the device, is not known.
    """
    if device.platform != "cuda":
        raise NotPredicted("no step on a TPU has been measured yet to compare with")
    facts: dict[str, None] = {}
    try:
        usual, best, worst = (
            _Timer(program, device, hosts, attained, facts).seconds_of(program.entry)
            for attained in (USUAL, BEST, WORST)
        )
    except NotPredicted:
        raise
    except (LookupError, ValueError) as error:
        raise NotPredicted(f"the program's text is not as expected: {error!r}") from error
    seconds, least, most = (sum(spent.values()) for spent in (usual, best, worst))
    return StepTime(seconds, least, most, usual, list(facts))


@dataclass(frozen=True)
class _Timer:
    program: Program
    device: Device
    hosts: Sequence[int]
    attained: Attained
    facts: dict[str, None]

    def seconds_of(self, name: str) -> Spent:
        """Return the seconds of a computation's run."""
        computation = self.program.computations[name]
        spent: Spent = {}
        link_is_free, ends = 0.0, dict[str, float]()
        for one in computation.instructions.values():
            now = sum(spent.values())
            kind, phase = _kind_and_phase(one.operation)
            if kind in _COLLECTIVES and phase == "done":
                _add(spent, {"communication": max(0.0, ends.pop(one.operands[0]) - now)})
            elif kind in _COLLECTIVES:
                link_is_free = max(now, link_is_free) + self._sending(kind, computation, one)
                if phase == "start":
                    ends[one.name] = link_is_free
                else:
                    _add(spent, {"communication": link_is_free - now})
            elif called := self.program.called(one):
                _add(spent, self._called(one, called))
            else:
                _add(spent, self._kernel(computation, one))
        return spent

    def _called(self, one: Instruction, called: list[tuple[str, int | None]]) -> Spent:
        """Return the seconds of a call, of a loop, or of a conditional's longest branch."""
        found: list[Spent] = []
        for name, times in called:
            if times is None:
                raise NotPredicted(f"the loop {one.name} does not say how often it turns")
            once = self.seconds_of(name) if times else {}
            found.append({part: seconds * times for part, seconds in once.items()})
        return max(found, key=lambda spent: sum(spent.values()))

    def _kernel(self, computation: Computation, one: Instruction) -> Spent:
        num_bytes = self.program.bytes_moved(computation, one)
        if not num_bytes:
            return {}
        self._refuse(computation, one)
        part, share = "other kernels", self.attained.products
        if one.target == _TRITON:
            part, share = "attention", self.attained.attention
            products = _attention(computation, one)
        elif products := self.program.products(computation, one):
            part = "products"
        what = f"the bandwidth of the memory of {self.device.kind}"
        hbm_gb_s = self._attained("hbm_gb_s", self.attained.memory, USUAL.memory, what)
        moving = num_bytes / (hbm_gb_s * 1e9)
        computing = sum(
            flops / (self._tflops(dtype, share) * 1e12) for dtype, flops in products.items()
        )
        return {part: max(moving, computing), "launches": self.attained.launch_seconds}

    def _refuse(self, computation: Computation, one: Instruction) -> None:
        """Raise NotPredicted of what is neither bytes nor products."""
        for _, each in self.program.within(computation, one):
            is_known = each.target in (_TRITON, *_MOVING_CALLS) or each.is_product
            kind, _ = _kind_and_phase(each.operation)
            if kind in _NOT_COUNTED and not is_known:
                what = f"custom call {each.target}" if each.target else each.operation
                raise NotPredicted(f"the {what} is not known")
            if kind in _COLLECTIVES:
                raise NotPredicted(f"the {each.operation} in {one.name} is part of a kernel")
        if "S(5)" in one.result:
            raise NotPredicted("the speed of copies to the host's memory is not known")

    def _tflops(self, dtype: str, share: float) -> float:
        fact = {
            "bf16": "bfloat16_tflops", "f16": "bfloat16_tflops",
            "f32": "tf32_tflops", "f32 highest": "float32_tflops",
        }.get(dtype, "")  # fmt: skip
        what = f"the speed of products of {dtype} on {self.device.kind}"
        return self._attained(fact, share, USUAL.products, what)

    def _attained(self, fact: str, share: float, usual: float, what: str) -> float:
        """Return a share of a figure of the device; NotPredicted says `what` is not known.

        A measured figure takes the place of the usual share.
        """
        measured = self.device.measured.get(fact)
        known = getattr(self.device, fact, None) if measured is None else measured / usual
        if known is None:
            raise NotPredicted(f"{what} is not known")
        self.facts[fact] = None
        return share * float(known)

    def _sending(self, kind: str, computation: Computation, one: Instruction) -> float:
        """Return the seconds that a collective's slower link needs, by NCCL's rings.

        In an all-to-all each device sends its parts itself.
        """
        groups = _groups(one.text, len(self.hosts))
        size = max(map(len, groups))
        if size == 1:
            return 0.0
        in_hosts = [Counter(self.hosts[number] for number in group) for group in groups]
        is_across = any(len(each) > 1 for each in in_hosts)
        members = min(min(each.values()) for each in in_hosts)
        operands = (computation.instructions[name].result for name in one.operands)
        num_bytes = sum(map(array_bytes, operands))
        turns = {"all-reduce": 2 * (size - 1), "collective-permute": 1}.get(kind, size - 1)
        each_turn = num_bytes if kind in ("all-gather", "collective-permute") else num_bytes / size
        # Of a ring's members in one host each sends a part of what goes to other hosts.
        of_host, of_network = 1.0, 1 / members
        if kind == "all-to-all":
            of_host, of_network = (members - 1) / (size - 1), (size - members) / (size - 1)
        seconds = 0.0
        for link, is_used, share in (
            ("host", members > 1 or not is_across, of_host),
            ("network", is_across, of_network),
        ):
            if is_used:
                sending = turns * each_turn * share / (self._gb_s(link) * 1e9)
                seconds = max(seconds, sending + turns * _SECONDS_OF_TURN[link])
        return _SECONDS_OF_COLLECTIVE + seconds

    def _gb_s(self, link: str) -> float:
        other = "other devices of its host" if link == "host" else "other hosts"
        what = f"the speed of the link of {self.device.kind} to {other}"
        return self._attained(f"{link}_gb_s", self.attained.links, USUAL.links, what)


def _add(spent: Spent, more: Spent) -> None:
    for part, seconds in more.items():
        spent[part] = spent.get(part, 0.0) + seconds


def _kind_and_phase(operation: str) -> tuple[str, str]:
    for phase in ("start", "done"):
        if operation.endswith(f"-{phase}"):
            return operation.removesuffix(f"-{phase}"), phase
    return operation, ""


def _attention(computation: Computation, one: Instruction) -> dict[str, int]:
    """Return the operations of attention's kernels by dtype; packed rows and windows count whole.

    Dims: queries (…, Q, H, K), keys (…, M, G, K), with the head dim K.
    """
    name = _ATTENTION.search(one.text)
    if name is None or name[1] not in _ATTENTION_PRODUCTS:
        raise NotPredicted("a kernel of Triton is not known")
    queries, keys = (computation.instructions[each].result for each in one.operands[:2])
    one_product = 2 * math.prod(dims_of(queries)) * dims_of(keys)[-3]
    flops = _ATTENTION_PRODUCTS[name[1]] * one_product
    return {queries.partition("[")[0]: flops // 2 if name[2] else flops}


def _groups(text: str, num_devices: int) -> list[list[int]]:
    """Return the groups of partitions that exchange with each other, by all notations of HLO."""
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
