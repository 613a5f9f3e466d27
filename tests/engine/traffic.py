"""Count what a compiled program sends between devices.

Reads the text of an optimised HLO module: every collective, how many bytes it moves, and how
often it runs (a loop's body as often as the compiler says the loop turns, or, where it does not
say, until what it adds to its counter, from 0 as scans do, reaches the constant that it counts to;
a loop that runs only where labels count differently, never).
It reads text alone: no models, meshes or devices.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from redco_flow.engine.step.seldom import turns_seldom

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%[\w.\-]+ = (.*?) ([a-z][\w\-]*)\((.*)$")
_SHAPE = re.compile(r"\b(pred|[a-z]+\d+(?:e\dm\d\w*)?)\[([\d,]*)\]")
_CALLED = re.compile(r"\b(?:to_apply|body|condition|calls)=%?([\w.\-]+)")
_CONDITION = re.compile(r"\bcondition=%?([\w.\-]+)")
_BODY = re.compile(r"\bbody=%?([\w.\-]+)")
_CONSTANT = re.compile(r"^\s+%([\w.\-]+) = [su]32\[\]\S* constant\((\d+)\)")
_PARAMETER = re.compile(r"^\s+%([\w.\-]+) = [su]32\[\]\S* parameter\((\d+)\)")
_FUSED = re.compile(r"^\s+ROOT .* fusion\(([^)]*)\), .*\bcalls=%?([\w.\-]+)")
_COUNTS_UP = re.compile(r"^\s+ROOT .* compare\(%([\w.\-]+), %([\w.\-]+)\), direction=LT")
_ELEMENT = re.compile(r"^\s+%([\w.\-]+) = [su]32\[\]\S* get-tuple-element\(.*\), index=(\d+)")
_RESULTS = re.compile(r"^\s+ROOT .* tuple\(([^)]*)\)")
_ADDED = re.compile(r"^\s+%([\w.\-]+) = [su]32\[\]\S* add\(%([\w.\-]+), %([\w.\-]+)\)")
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_CHANNEL = re.compile(r"\bchannel_id=(\d+)")
_LISTED_GROUP = re.compile(r"replica_groups=\{\{([\d,]+)\}")
_COUNTED_GROUPS = re.compile(r"replica_groups=\[(\d+),(\d+)\]")
# Devices in another order than their numbers' are listed between the two.
_MESH_GROUPS = re.compile(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}")
_MESH_AXIS = re.compile(r"'([^']+)'=(\d+)")
_MESH_AXIS_USE = re.compile(r"'([^']+)'(?::\(\d+\)(\d+))?")
_KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
)
_SCATTERING = "all-reduce-scatter"


@dataclass(frozen=True)
class Collective:
    """One collective instruction.

    Args:
        kind: all-reduce, all-gather, reduce-scatter, all-to-all or collective-permute.
        num_bytes: of the whole array that each device takes part with: an all-gather's result, a
            reduce-scatter's operand, else either.
        group_size: devices that exchange with each other.
        count: how often it runs.
    """

    kind: str
    num_bytes: int
    group_size: int
    count: int

    @property
    def wire_bytes(self) -> float:
        """Bytes that each device sends, over all its runs, by the best ring algorithm."""
        share = (self.group_size - 1) / self.group_size
        factor = {"all-reduce": 2 * share, "collective-permute": 1.0}.get(self.kind, share)
        return factor * self.num_bytes * self.count


@dataclass
class _Computation:
    """A computation's collectives, and the computations it calls with their counts.

    Args:
        channels: of each collective the channel that it uses; empty where it tells none.
        fusions: computations that fusions call, each once.
        loops: as `calls`, of loops whose count their condition tells: (called, condition, body).
        constants: whole numbers by name.
        parameters: positions of the whole numbers that it is given, by name.
        elements: positions of the whole numbers that it takes out of a tuple, by name.
        added: the two operands of sums of whole numbers, by name.
        results: its result's elements by name, where that is a tuple.
        counter, counts_to: what its result compares, by name; empty where it is something else.
        fused: the computation that makes its result, if a fusion does, and its operands.
    """

    collectives: list[Collective] = field(default_factory=list)
    channels: list[str] = field(default_factory=list)
    fusions: list[str] = field(default_factory=list)
    calls: list[tuple[str, int]] = field(default_factory=list)
    loops: list[tuple[str, str, str]] = field(default_factory=list)
    constants: dict[str, int] = field(default_factory=dict)
    parameters: dict[str, int] = field(default_factory=dict)
    elements: dict[str, int] = field(default_factory=dict)
    added: dict[str, tuple[str, str]] = field(default_factory=dict)
    results: list[str] = field(default_factory=list)
    counter: str = ""
    counts_to: str = ""
    fused: tuple[str, list[str]] | None = None


def read_collectives(hlo_text: str) -> list[Collective]:
    """Return every collective of a module, in no particular order.

    Args:
        hlo_text: `compiled.as_text()`.

    Raises:
        ValueError: it has no entry computation, or a collective is in a loop whose number of
            iterations the compiler does not report.
    """
    computations, entry = parse_module(hlo_text)
    if entry is None:
        raise ValueError("not the text of an HLO module: it has no ENTRY computation.")
    return list(_walk(computations, entry, 1, set()))


def wire_bytes(hlo_text: str) -> float:
    """Return the bytes that each device sends when the program runs once."""
    return sum(collective.wire_bytes for collective in read_collectives(hlo_text))


def parse_module(text: str) -> tuple[dict[str, _Computation], str | None]:
    """Return a module's computations by name, and which one is its entry."""
    computations: dict[str, _Computation] = {}
    current, entry = _Computation(), None
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            current = computations[header[1]] = _Computation()
            entry = header[1] if line.startswith("ENTRY") else entry
        elif instruction := _INSTRUCTION.match(line):
            _read_instruction(current, *instruction.groups())
            _read_limit(current, line)
    return computations, entry


def _read_instruction(computation: _Computation, shape: str, operation: str, rest: str) -> None:
    kind = operation.removesuffix("-start")
    if kind in _KINDS:
        group = _group_size(rest)
        num_bytes = _result_bytes(shape, is_started=operation != kind)
        if kind == "reduce-scatter":
            num_bytes *= group
        computation.collectives.append(Collective(kind, num_bytes, group, 1))
        computation.channels += _CHANNEL.findall(rest)[:1] or [""]
        return
    if turns_seldom(rest):
        return
    called, turns = _CALLED.findall(rest), _TRIPS.search(rest)
    if operation == "while" and not turns:
        condition, body = _CONDITION.findall(rest)[0], _BODY.findall(rest)[0]
        computation.loops += [(name, condition, body) for name in called]
        return
    if operation == "fusion":
        computation.fusions += called
        return
    count = int(turns[1]) if operation == "while" and turns else 1
    computation.calls += [(name, count) for name in called]
    for names in _BRANCHES.findall(rest):
        computation.calls += [(name.strip().lstrip("%"), 1) for name in names.split(",")]


def _read_limit(computation: _Computation, line: str) -> None:
    if constant := _CONSTANT.match(line):
        computation.constants[constant[1]] = int(constant[2])
    elif parameter := _PARAMETER.match(line):
        computation.parameters[parameter[1]] = int(parameter[2])
    elif element := _ELEMENT.match(line):
        computation.elements[element[1]] = int(element[2])
    elif added := _ADDED.match(line):
        computation.added[added[1]] = added[2], added[3]
    elif results := _RESULTS.match(line):
        computation.results = _names(results[1])
    elif compared := _COUNTS_UP.match(line):
        computation.counter, computation.counts_to = compared[1], compared[2]
    elif fused := _FUSED.match(line):
        computation.fused = fused[2], _names(fused[1])


def _names(operands: str) -> list[str]:
    """Return the names in a list of operands, in which comments may stand."""
    return re.findall(r"%([\w.\-]+)", operands)


def loop_turns(computations: dict[str, _Computation], condition: str, body: str) -> int:
    """Return how often a loop of parsed computations turns; -1 where nothing tells."""
    limit = _limit(computations, condition)
    judge, turn = (computations.get(name, _Computation()) for name in (condition, body))
    place = judge.elements.get(judge.counter, len(turn.results))
    if place >= len(turn.results):
        return limit
    # A body that does the work of several turns adds as many.
    counter, constant = turn.added.get(turn.results[place], ("", ""))
    is_counter = turn.elements.get(counter) == place
    step = turn.constants.get(constant, 1) if is_counter else 1
    return limit if limit < 0 else -(-limit // max(step, 1))


def _limit(computations: dict[str, _Computation], condition: str) -> int:
    """Return what a loop's condition counts to; -1 where it is something else."""
    computation = computations.get(condition, _Computation())
    name = computation.counts_to
    if computation.fused:
        called, operands = computation.fused
        inner = computations.get(called, _Computation())
        if inner.counts_to not in inner.parameters:
            return inner.constants.get(inner.counts_to, -1)
        name = operands[inner.parameters[inner.counts_to]]
    return computation.constants.get(name, -1)


def _walk(
    computations: dict[str, _Computation], name: str, count: int, seen: set[str]
) -> Iterator[Collective]:
    """Yield what a computation sends that runs `count` times; `seen` are channels of fusions."""
    computation = computations.get(name, _Computation())
    for one in computation.collectives:
        yield _counted(one, name, count)
    counted = [
        (called, loop_turns(computations, condition, body))
        for called, condition, body in computation.loops
    ]
    yield from _fused(computations, computation.fusions, name, count, seen)
    for called, times in [*computation.calls, *counted]:
        # A loop of unknown length around anything makes all of it unknown.
        yield from _walk(computations, called, count * times if min(count, times) > 0 else -1, seen)


def _fused(
    computations: dict[str, _Computation],
    fusions: list[str],
    name: str,
    count: int,
    seen: set[str],
) -> Iterator[Collective]:
    """Yield what fusions send.

    A TPU's compiler writes one that runs beside other work as several fusions: where it begins, in
    each of these works, in loops too, and where it ends. They use one channel. A reduce-scatter it
    writes as a fusion of that name around an all-reduce, of which a slice is left.
    """
    for called in fusions:
        inner = computations.get(called, _Computation())
        for one, channel in zip(inner.collectives, inner.channels, strict=True):
            if called.startswith(_SCATTERING) and one.kind == "all-reduce":
                one = replace(one, kind="reduce-scatter")
            if not channel or channel not in seen:
                yield _counted(one, name, count)
            seen.add(channel)
        yield from _fused(computations, inner.fusions, name, count, seen)


def _counted(one: Collective, name: str, count: int) -> Collective:
    if count < 0:
        raise ValueError(
            f"{one.kind} of {one.num_bytes} bytes runs in the loop {name}, whose number of "
            f"turns is not known."
        )
    return Collective(one.kind, one.num_bytes, one.group_size, count)


def _result_bytes(shape: str, *, is_started: bool) -> int:
    """Bytes of the result; an asynchronous start's tuple names operands first, then results.

    Whole numbers without a dim after them (`u32[]`) are a permutation's own bookkeeping.
    """
    arrays = [found for found in _SHAPE.findall(shape) if not is_started or found != ("u32", "")]
    sizes = [_array_bytes(dtype, dims) for dtype, dims in arrays]
    if is_started and len(sizes) > 1:
        sizes = sizes[len(sizes) // 2 :]
    return sum(sizes)


def _array_bytes(dtype: str, dims: str) -> int:
    bits = 8 if dtype == "pred" else int(re.search(r"\d+", dtype)[0])  # type: ignore[index]
    return math.prod(int(dim) for dim in dims.split(",") if dim) * bits // 8


def _group_size(rest: str) -> int:
    if listed := _LISTED_GROUP.search(rest):
        return len(listed[1].split(","))
    if counted := _COUNTED_GROUPS.search(rest):
        return int(counted[2])
    if mesh := _MESH_GROUPS.search(rest):
        sizes = {name: int(size) for name, size in _MESH_AXIS.findall(mesh[1])}
        # An axis may be used in part: 'axis':(skipped)used.
        used = _MESH_AXIS_USE.findall(mesh[2])
        return math.prod(int(part) if part else sizes[name] for name, part in used)
    return 1 if "source_target_pairs" not in rest else 2
