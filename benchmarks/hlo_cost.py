"""Count what a compiled program multiplies and moves in device memory, from the text of its HLO.

Walks the computations from the entry, a loop's body as often as the loop turns. An instruction
reads its operands and writes its result, but: a slice of an array is read for its own size, also
inside a fusion; what is updated in place is written for the update's size; what lies in a TPU
core's own memory (`S(1)` in its layout, and other spaces) is not counted. A Pallas kernel counts
for its operands and result; its FLOPs are not in the text, so its runs are counted beside.
"""

import math
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from redco_flow.engine.step import program_flops
from redco_flow.engine.step.program_flops import Instruction
from redco_flow.engine.step.seldom import turns_seldom
from tests.engine.traffic import loop_turns, parse_module

_ARRAY = re.compile(r"\b(pred|[a-z]+\d+(?:e\dm\d\w*)?)\[([\d,]*)\](\{[^}]*\})?")
_CALLED = re.compile(r"\b(?:calls|to_apply)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
_WHILE = re.compile(r"\bbody=%?([\w.\-]+)")
_CONDITION = re.compile(r"\bcondition=%?([\w.\-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_OTHER_SPACE = re.compile(r"S\([1-9]\d*\)")
_CONSTANT = re.compile(r"s32\[\]\S* constant\((\d+)\)")
_TARGET = re.compile(r'custom_call_target="([^"]+)"')

# They move nothing, or only name what others moved.
_FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "iota",
    "partition-id", "replica-id", "opt-barrier", "copy-done", "slice-done", "async-done",
    "async-update", "all-reduce-done", "all-gather-done", "collective-permute-done",
}  # fmt: skip
_VIEWS = ("bitcast", "get-tuple-element", "copy-done", "convert")
_SLICES = ("dynamic-slice", "slice", "gather")


@dataclass
class Computation(program_flops.Computation):
    """One whose data flow can be followed."""

    def users(self, name: str) -> list[Instruction]:
        """Return what reads an instruction, also through views; of views the root itself."""
        found = []
        for one in self.instructions.values():
            if name in one.operands:
                views = one.operation in _VIEWS and one.name != self.root
                found += self.users(one.name) if views else [one]
        return found

    def parameters(self) -> list[Instruction]:
        found = [one for one in self.instructions.values() if one.operation == "parameter"]
        return sorted(found, key=lambda one: int(re.match(r"\d+", one.text)[0]))


@dataclass(frozen=True)
class Moved:
    """What an instruction moves each time, and how often it runs."""

    instruction: Instruction
    num_bytes: int
    count: int


@dataclass(frozen=True)
class Loop:
    """A loop whose number of turns the compiler does not know: bytes of one turn."""

    name: str
    limit: int
    num_bytes: int
    moved: tuple[Moved, ...]


class Program:
    """A module's computations."""

    def __init__(self, text: str) -> None:
        self._collectives, _ = parse_module(text)
        found, self.entry = program_flops.read_computations(text)
        self.computations = {
            name: Computation(one.instructions, one.root) for name, one in found.items()
        }

    def hbm_bytes(self) -> int:
        """Return the bytes that one run reads and writes."""
        return sum(moved.num_bytes * moved.count for moved in self._walk(self.entry, 1))

    def flops(self) -> int:
        """Return the operations of one run's products, two for each that is added up."""
        return sum(
            program_flops.flops_of(computation, one) * count
            for computation, one, count in self._runs(self.entry, 1)
        )

    def kernels(self) -> dict[str, int]:
        """Return how often each kind of custom call runs."""
        found: Counter[str] = Counter()
        for _, one, count in self._runs(self.entry, 1):
            if one.operation == "custom-call":
                found[_TARGET.search(one.text)[1]] += count
        return dict(found)

    def _runs(self, name: str, count: int) -> Iterator[tuple[Computation, Instruction, int]]:
        """Yield what runs, what is inside of fusions too, with where it stands and how often."""
        computation = self.computations[name]
        for one in computation.instructions.values():
            yield computation, one, count
            inside = [(each, 1) for each in _CALLED.findall(one.text) if one.operation == "fusion"]
            for inner, times in [*self._called(one), *inside]:
                yield from self._runs(inner, count * times)

    def open_loops(self) -> list[Loop]:
        """Return the outermost loops that may end before they have counted to their limit."""
        return [
            Loop(body, self._limit(one), sum(m.num_bytes * m.count for m in moved), tuple(moved))
            for one, body in self._find_open(self.entry)
            for moved in [list(self._walk(body, 1))]
        ]

    def _find_open(self, name: str) -> Iterator[tuple[Instruction, str]]:
        for one in self.computations[name].instructions.values():
            if one.operation == "while" and self._turns(one) is None:
                yield one, _WHILE.search(one.text)[1]
            else:
                for called, _ in self._called(one):
                    yield from self._find_open(called)

    def _turns(self, loop: Instruction) -> int | None:
        """Return how often a loop turns: as the compiler says, or as scans count, from 0."""
        if turns_seldom(loop.text):
            return 0
        if turns := _TRIPS.search(loop.text):
            return int(turns[1])
        condition = self.computations[_CONDITION.search(loop.text)[1]]
        is_counted = condition.instructions[condition.root].operation == "compare"
        if not is_counted:
            return None
        names = (_CONDITION.search(loop.text)[1], _WHILE.search(loop.text)[1])
        return loop_turns(self._collectives, *names)

    def _limit(self, loop: Instruction) -> int:
        """Return the largest number that a loop's condition knows."""
        name = _CONDITION.search(loop.text)[1]
        bodies = [self.computations[each].instructions for each in (name, *self._fusions_of(name))]
        lines = [f"{one.result} {one.operation}({one.text}" for b in bodies for one in b.values()]
        return max((int(n) for line in lines for n in _CONSTANT.findall(line)), default=0)

    def _fusions_of(self, name: str) -> list[str]:
        instructions = self.computations[name].instructions.values()
        return [called for one in instructions for called in _CALLED.findall(one.text)]

    def _called(self, one: Instruction) -> list[tuple[str, int]]:
        """Return computations that run as such, and how often; not those that fusions name."""
        if one.operation == "while":
            turns = self._turns(one)
            return [(_WHILE.search(one.text)[1], 1 if turns is None else turns)]
        if one.operation == "call":
            return [(name, 1) for name in _CALLED.findall(one.text)]
        branches = _BRANCHES.findall(one.text) if one.operation == "conditional" else []
        return [(name.strip().lstrip("%"), 1) for each in branches for name in each.split(",")]

    def _walk(self, name: str, count: int) -> Iterator[Moved]:
        computation = self.computations[name]
        for one in computation.instructions.values():
            called = self._called(one)
            for inner, times in called:
                yield from self._walk(inner, count * times)
            if not called and one.operation not in _FREE:
                num_bytes = self._bytes(computation, one)
                if num_bytes:
                    yield Moved(one, num_bytes, count)

    def _bytes(self, computation: Computation, one: Instruction) -> int:
        """Return what one run of an instruction reads and writes."""
        operands = [computation.instructions[name].result for name in one.operands]
        fused = None
        if one.operation in ("fusion", "async-start"):
            fused = self.computations[_CALLED.search(one.text)[1]]
        if fused is None:
            return _plain_bytes(one, operands)
        fused = self._inlined(fused)
        read = 0
        for parameter, operand in zip(fused.parameters(), operands, strict=True):
            part, whole = self._read_bytes(fused, parameter.name), array_bytes(operand)
            read += whole if part is None else min(part, whole)
        return read + self._written_bytes(fused, one)

    def _read_bytes(self, fused: Computation, name: str) -> int | None:
        """Return the bytes of the parts that a fusion reads of a parameter; None: of all of it."""
        parts = [self._part_bytes(fused, user, name) for user in fused.users(name)]
        return None if None in parts else sum(parts)

    def _part_bytes(self, fused: Computation, user: Instruction, name: str) -> int | None:
        places = [place for place, o in enumerate(user.operands) if _source(fused, o) == name]
        if user.operation == "fusion":
            inner = self.computations[_CALLED.search(user.text)[1]]
            parameters = inner.parameters()
            parts = [self._read_bytes(inner, parameters[place].name) for place in places]
            return None if None in parts else sum(parts)
        if places == [0] and user.operation in _SLICES:
            return array_bytes(_bare(user.result))
        # What is updated in place is not read.
        return 0 if places == [0] and user.operation == "dynamic-update-slice" else None

    def _inlined(self, fused: Computation) -> Computation:
        """Return a fusion that only calls another one as that one."""
        inner = [one for one in fused.instructions.values() if one.operation != "parameter"]
        if len(inner) == 1 and inner[0].operation == "fusion":
            return self.computations[_CALLED.search(inner[0].text)[1]]
        return fused

    def _written_bytes(self, fused: Computation, one: Instruction) -> int:
        root = fused.instructions[fused.root]
        roots = [root]
        if root.operation == "tuple":
            roots = [fused.instructions[name] for name in root.operands]
        arrays = [
            "".join((array[0], f"[{array[1]}]", array[2])) for array in _ARRAY.findall(one.result)
        ]
        if len(roots) != len(arrays):
            return array_bytes(one.result)
        return sum(
            array_bytes(_updated(fused, made) or array)
            for made, array in zip(roots, arrays, strict=True)
            if array_bytes(array)
        )


def array_bytes(shape: str) -> int:
    """Return the bytes of all arrays in a shape that lie in the device's main memory."""
    return sum(
        _bits(dtype) * _elements(dims) // 8
        for dtype, dims, layout in _ARRAY.findall(shape)
        if _is_main(layout)
    )


def _bits(dtype: str) -> int:
    return 8 if dtype == "pred" else int(re.search(r"\d+", dtype)[0])


def _elements(dims: str) -> int:
    return math.prod(int(dim) for dim in dims.split(",") if dim)


def _is_main(layout: str) -> bool:
    return not _OTHER_SPACE.search(layout)


def _plain_bytes(one: Instruction, operands: list[str]) -> int:
    if one.operation in _SLICES:
        return 2 * array_bytes(one.result)
    if one.operation == "dynamic-update-slice":
        return 2 * array_bytes(operands[1])
    if one.operation in ("copy-start", "slice-start"):
        return _started_bytes(one.result)
    return sum(array_bytes(operand) for operand in operands) + array_bytes(one.result)


def _started_bytes(result: str) -> int:
    """Return the bytes of an asynchronous copy; its result names what it makes, then its source."""
    arrays = _ARRAY.findall(result)[:2]
    moved = min(_elements(dims) for _, dims, _ in arrays)
    return sum(moved * _bits(dtype) // 8 for dtype, _, layout in arrays if _is_main(layout))


def _bare(shape: str) -> str:
    """Return a shape without layouts: inside of a fusion they say nothing of memory."""
    return re.sub(r"\{[^}]*\}", "", shape)


def _source(fused: Computation, name: str) -> str:
    one = fused.instructions[name]
    return _source(fused, one.operands[0]) if one.operation in _VIEWS else name


def _updated(fused: Computation, made: Instruction) -> str | None:
    """Return the shape of the update, where a fusion's result is an operand updated in place."""
    one = fused.instructions[_source(fused, made.name)]
    if one.operation != "dynamic-update-slice":
        return None
    if fused.instructions[_source(fused, one.operands[0])].operation != "parameter":
        return None
    return _bare(fused.instructions[one.operands[1]].result)
