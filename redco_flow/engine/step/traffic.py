"""Count what a compiled program sends between devices.

Reads the text of an optimised HLO module: every collective, how many bytes it moves, and how
often it runs (a loop's body as often as the compiler says the loop turns, or, where it does not
say, up to the constant that the loop counts to, from 0 as scans do). Knows text only; refuses to
know models, meshes and devices.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%[\w.\-]+ = (.*?) ([a-z][\w\-]*)\((.*)$")
_SHAPE = re.compile(r"\b(pred|[a-z]+\d+(?:e\dm\d\w*)?)\[([\d,]*)\]")
_CALLED = re.compile(r"\b(?:to_apply|body|condition|calls)=%?([\w.\-]+)")
_CONDITION = re.compile(r"\bcondition=%?([\w.\-]+)")
_CONSTANT = re.compile(r"^\s+%([\w.\-]+) = s32\[\]\S* constant\((\d+)\)")
_COUNTS_UP = re.compile(r"^\s+ROOT .* compare\(%[\w.\-]+, %([\w.\-]+)\), direction=LT")
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_LISTED_GROUP = re.compile(r"replica_groups=\{\{([\d,]+)\}")
_COUNTED_GROUPS = re.compile(r"replica_groups=\[(\d+),(\d+)\]")
_MESH_GROUPS = re.compile(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}")
_MESH_AXIS = re.compile(r"'([^']+)'=(\d+)")
_MESH_AXIS_USE = re.compile(r"'([^']+)'(?::\(\d+\)(\d+))?")
_KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
)


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
        loops: the same of loops whose count is their condition's `limit`: (called, condition).
        constants: whole numbers by name.
        limit: what a loop's condition counts to; -1 where it is something else.
    """

    collectives: list[Collective] = field(default_factory=list)
    calls: list[tuple[str, int]] = field(default_factory=list)
    loops: list[tuple[str, str]] = field(default_factory=list)
    constants: dict[str, int] = field(default_factory=dict)
    limit: int = -1


def read_collectives(hlo_text: str) -> list[Collective]:
    """Return every collective of a module, in no particular order.

    Args:
        hlo_text: `compiled.as_text()`.

    Raises:
        ValueError: it has no entry computation, or a collective stands in a loop whose number of
            turns the compiler does not tell.
    """
    computations, entry = _parse(hlo_text)
    if entry is None:
        raise ValueError("not the text of an HLO module: it has no ENTRY computation.")
    return list(_walk(computations, entry, 1))


def wire_bytes(hlo_text: str) -> float:
    """Return the bytes that each device sends when the program runs once."""
    return sum(collective.wire_bytes for collective in read_collectives(hlo_text))


def _parse(text: str) -> tuple[dict[str, _Computation], str | None]:
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
        return
    called, turns = _CALLED.findall(rest), _TRIPS.search(rest)
    if operation == "while" and not turns:
        condition = _CONDITION.findall(rest)[0]
        computation.loops += [(name, condition) for name in called]
        return
    count = int(turns[1]) if operation == "while" and turns else 1
    computation.calls += [(name, count) for name in called]
    for names in _BRANCHES.findall(rest):
        computation.calls += [(name.strip().lstrip("%"), 1) for name in names.split(",")]


def _read_limit(computation: _Computation, line: str) -> None:
    if constant := _CONSTANT.match(line):
        computation.constants[constant[1]] = int(constant[2])
    elif compared := _COUNTS_UP.match(line):
        computation.limit = computation.constants.get(compared[1], -1)


def _walk(computations: dict[str, _Computation], name: str, count: int) -> Iterator[Collective]:
    computation = computations.get(name, _Computation())
    for one in computation.collectives:
        if count < 0:
            raise ValueError(
                f"{one.kind} of {one.num_bytes} bytes runs in the loop {name}, whose number of "
                f"turns is not known."
            )
        yield Collective(one.kind, one.num_bytes, one.group_size, count)
    counted = [
        (called, computations.get(condition, _Computation()).limit)
        for called, condition in computation.loops
    ]
    for called, times in [*computation.calls, *counted]:
        # A loop of unknown length around anything makes all of it unknown.
        yield from _walk(computations, called, count * times if min(count, times) > 0 else -1)


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
