"""Read a compiled program from the text of its optimized HLO: what it multiplies, moves and sends.

Walks the computations from the entry, a loop's body as often as the loop turns: XLA's own count has
it once. The operations of kernels (Pallas, Triton, cuDNN) are not in the text: their runs are
counted instead. An instruction reads its operands from memory and writes its result, but: a slice
of an array is read for its own size, also inside a fusion; what is updated in place is written for
the update's size; what lies in a TPU core's own memory (`S(1)` in its layout, and other spaces) is
not counted.
"""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from redco_flow.engine.step.seldom import turns_seldom

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")
_ARRAY = re.compile(r"\b(pred|[a-z]+\d+(?:e\dm\d\w*)?)\[([\d,]*)\](\{[^}]*\})?")
_CALLED = re.compile(r"\b(?:calls|to_apply)=%?([\w.\-]+)")
_BRANCHES = re.compile(
    r"\b(?:branch_computations=\{([^}]*)\}|(?:true|false)_computation=(%?[\w.\-]+))"
)
_WHILE = re.compile(r"\bbody=%?([\w.\-]+)")
_CONDITION = re.compile(r"\bcondition=%?([\w.\-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_TARGET = re.compile(r'custom_call_target="([^"]+)"')
_OPERAND = re.compile(r"%([\w.\-]+)")
_WINDOW = re.compile(r"window=\{([^}]*)\}")
_INDEX = re.compile(r"\bindex=(\d+)")
_CONSTANT = re.compile(r"s32\[\]\S* constant\((\d+)\)")
_CONTRACTED = re.compile(r'\blhs_contracting_dim(?:s=\{|ensions":\[)([\d,"]*)')
_PRECISION = re.compile(
    r"""\b(?:operand_precision(?:=\{|":\[")(?=highest)|algorithm(?:=|":")(?=dot_|ALG_DOT))(\w+)""",
    re.I,
)
_OTHER_SPACE = re.compile(r"S\([1-9]\d*\)")
_CUBLAS = ("__cublas$gemm", "__cublas$lt$matmul")

# They move nothing, or only name what others moved.
_FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "iota",
    "partition-id", "replica-id", "opt-barrier", "copy-done", "slice-done", "async-done",
    "async-update", "all-reduce-done", "all-gather-done", "reduce-scatter-done",
    "all-to-all-done", "collective-permute-done",
}  # fmt: skip
_VIEWS = ("bitcast", "get-tuple-element", "copy-done", "convert")
_SLICES = ("dynamic-slice", "slice", "gather")


@dataclass(frozen=True)
class Instruction:
    """One instruction: its name, result, operation, operands, and the text behind these."""

    name: str
    result: str
    operation: str
    operands: tuple[str, ...]
    text: str

    @property
    def target(self) -> str:
        """The target of a custom call; empty of anything else."""
        found = _TARGET.search(self.text) if self.operation == "custom-call" else None
        return found[1] if found else ""

    @property
    def is_product(self) -> bool:
        """Whether this is a matrix product outside of a fusion."""
        return self.operation == "dot" or self.target in _CUBLAS


@dataclass
class Computation:
    """Its instructions by name, in the order in which they run, and which is the root."""

    instructions: dict[str, Instruction] = field(default_factory=dict)
    root: str = ""

    def users(self, name: str) -> list[Instruction]:
        """Return what reads an instruction, also through views; of views the root itself."""
        found = []
        for one in self.instructions.values():
            if name in one.operands:
                views = one.operation in _VIEWS and one.name != self.root
                found += self.users(one.name) if views else [one]
        return found

    def parameters(self) -> list[Instruction]:
        """Return them in the order in which they are given."""
        found = [one for one in self.instructions.values() if one.operation == "parameter"]
        return sorted(found, key=lambda one: int(one.text.partition(")")[0]))


@dataclass(frozen=True)
class Moved:
    """The bytes that an instruction moves each time, and how often it runs."""

    instruction: Instruction
    num_bytes: int
    count: int


@dataclass(frozen=True)
class Loop:
    """A loop whose number of turns the compiler does not know: bytes of one turn.

    Args:
        limit: the largest number that its condition knows.
    """

    name: str
    limit: int
    num_bytes: int
    moved: tuple[Moved, ...]


class UnknownLoop(ValueError):
    """A loop has a number of turns that is not in the program."""


class Program:
    """A module's computations.

    Args:
        text: `compiled.as_text()`.
    """

    def __init__(self, text: str) -> None:
        self.computations: dict[str, Computation] = {}
        self.entry, current = "", Computation()
        for line in text.splitlines():
            if header := _COMPUTATION.match(line):
                current = self.computations[header[1]] = Computation()
                self.entry = header[1] if line.startswith("ENTRY") else self.entry
            elif instruction := _INSTRUCTION.match(line):
                is_root, name, result, operation, rest = instruction.groups()
                operands = tuple(_OPERAND.findall(_arguments(rest)))
                current.instructions[name] = Instruction(name, result, operation, operands, rest)
                current.root = name if is_root else current.root

    def flops(self) -> int:
        """Return the operations of one run's products on one device, two for each that is added up.

        Raises:
            UnknownLoop: they are not known.
        """
        total = 0
        for computation, one, count in self.runs():
            flops = _flops(computation, one)
            if flops and count is None:
                raise UnknownLoop(f"{one.name} is in a loop of unknown length")
            total += flops * (count or 0)
        return total

    def kernel_runs(self) -> dict[str, int]:
        """Return how often each kind of custom call runs; a loop of unknown length counts once."""
        found: Counter[str] = Counter()
        for _, one, count in self.runs():
            if one.target and one.target not in _CUBLAS:
                found[one.target] += 1 if count is None else count
        return dict(found)

    def hbm_bytes(self) -> int:
        """Return the bytes that one run reads and writes; a loop of unknown length counts once."""
        return sum(moved.num_bytes * moved.count for moved in self._moves(self.entry, 1))

    def open_loops(self) -> list[Loop]:
        """Return the outermost loops that may end before they have counted to their limit."""
        return [
            Loop(body, self._limit(one), sum(m.num_bytes * m.count for m in moved), tuple(moved))
            for one, body in self._find_open(self.entry)
            for moved in [list(self._moves(body, 1))]
        ]

    def called(self, one: Instruction) -> list[tuple[str, int | None]]:
        """Return the computations that an instruction runs, and how often; None: not known.

        Those that fusions name are kernels' own; of a conditional they are all branches.
        """
        if one.operation == "while" and (body := _WHILE.search(one.text)):
            return [(body[1], self._turns(one))]
        if one.operation == "call":
            return [(name, 1) for name in _CALLED.findall(one.text)]
        branches = _BRANCHES.findall(one.text) if one.operation == "conditional" else []
        names = (name for several, single in branches for name in (several or single).split(","))
        return [(name.strip().lstrip("%"), 1) for name in names]

    def within(
        self, computation: Computation, one: Instruction
    ) -> Iterator[tuple[Computation, Instruction]]:
        """Yield an instruction, and what is inside of it where it is a fusion."""
        yield computation, one
        if one.operation in ("fusion", "async-start"):
            inner = self._fused(one)
            for each in inner.instructions.values():
                yield from self.within(inner, each)

    def products(self, computation: Computation, one: Instruction) -> dict[str, int]:
        """Return the operations of an instruction's products, its fusion's too, by dtype.

        The dtype is the operands'; with `highest`, float32 is computed as such (on GPUs not TF32).
        An algorithm that is prescribed is named after it.
        """
        found: Counter[str] = Counter()
        for inside, each in self.within(computation, one):
            if flops := _flops(inside, each):
                operands = (inside.instructions[name].result for name in each.operands[:2])
                dtype = max((_ARRAY.findall(shape)[0][0] for shape in operands), key=_bits)
                kind = _PRECISION.search(each.text)
                found[f"{dtype} {kind[1].lower()}" if kind else dtype] += flops
        return dict(found)

    def bytes_moved(self, computation: Computation, one: Instruction) -> int:
        """Return what one run of an instruction reads from memory and writes to it."""
        if one.operation in _FREE:
            return 0
        operands = [computation.instructions[name].result for name in one.operands]
        if one.operation not in ("fusion", "async-start"):
            return _plain_bytes(one, operands)
        fused = self._inlined(self._fused(one))
        read = 0
        for parameter, operand in zip(fused.parameters(), operands, strict=True):
            part, whole = self._read_bytes(fused, parameter.name), array_bytes(operand)
            read += whole if part is None else min(part, whole)
        return read + _written_bytes(fused, one)

    def _fused(self, one: Instruction) -> Computation:
        return self.computations[_CALLED.findall(one.text)[0]]

    def runs(self) -> Iterator[tuple[Computation, Instruction, int | None]]:
        """Yield what runs, inside of fusions too, with where it is and how often; None: unknown."""
        return self._runs(self.entry, 1)

    def _runs(
        self, name: str, count: int | None
    ) -> Iterator[tuple[Computation, Instruction, int | None]]:
        computation = self.computations[name]
        for one in computation.instructions.values():
            yield from ((inside, each, count) for inside, each in self.within(computation, one))
            for called, times in self.called(one):
                if times != 0:
                    inner = None if count is None or times is None else count * times
                    yield from self._runs(called, inner)

    def _moves(self, name: str, count: int) -> Iterator[Moved]:
        computation = self.computations[name]
        for one in computation.instructions.values():
            called = self.called(one)
            for inner, times in called:
                yield from self._moves(inner, count * (1 if times is None else times))
            if not called and (num_bytes := self.bytes_moved(computation, one)):
                yield Moved(one, num_bytes, count)

    def _find_open(self, name: str) -> Iterator[tuple[Instruction, str]]:
        for one in self.computations[name].instructions.values():
            for called, times in self.called(one):
                if times is None:
                    yield one, called
                else:
                    yield from self._find_open(called)

    def _turns(self, loop: Instruction) -> int | None:
        """Return how often a loop turns: as the compiler says, or as scans count, from 0."""
        if turns_seldom(loop.text):
            return 0  # the usual run's count
        if turns := _TRIPS.search(loop.text):
            return int(turns[1])
        judge, turn = (
            self.computations[found[1]]
            for pattern in (_CONDITION, _WHILE)
            if (found := pattern.search(loop.text))
        )
        compare = judge.instructions[judge.root]
        if compare.operation != "compare" or "direction=LT" not in compare.text:
            return None
        counter, limit = (judge.instructions[name] for name in compare.operands)
        place, result = _INDEX.search(counter.text), turn.instructions[turn.root]
        if place is None or result.operation != "tuple":
            return None
        added = turn.instructions[result.operands[int(place[1])]]
        steps = [_constant(turn.instructions[name]) for name in added.operands]
        step, end = next((each for each in steps if each), None), _constant(limit)
        return None if added.operation != "add" or not step or end is None else -(-end // step)

    def _limit(self, loop: Instruction) -> int:
        condition = _CONDITION.search(loop.text)
        judge = self.computations[condition[1]] if condition else Computation()
        within = (
            each for one in judge.instructions.values() for _, each in self.within(judge, one)
        )
        return max((number for each in within if (number := _constant(each))), default=0)

    def _read_bytes(self, fused: Computation, name: str) -> int | None:
        """Return the bytes of the parts that a fusion reads of a parameter; None: of all of it."""
        total = 0
        for user in fused.users(name):
            if (part := self._part_bytes(fused, user, name)) is None:
                return None
            total += part
        return total

    def _part_bytes(self, fused: Computation, user: Instruction, name: str) -> int | None:
        places = [place for place, o in enumerate(user.operands) if _source(fused, o) == name]
        if user.operation == "fusion":
            inner = self._fused(user)
            parameters = inner.parameters()
            parts = [self._read_bytes(inner, parameters[place].name) for place in places]
            return None if None in parts else sum(part or 0 for part in parts)
        if places == [0] and user.operation in _SLICES:
            return array_bytes(_bare(user.result))
        # What is updated in place is not read.
        return 0 if places == [0] and user.operation == "dynamic-update-slice" else None

    def _inlined(self, fused: Computation) -> Computation:
        """Return the inner fusion where a fusion only calls another one, else the fusion itself."""
        inner = [one for one in fused.instructions.values() if one.operation != "parameter"]
        given = tuple(one.name for one in fused.parameters())
        is_call = len(inner) == 1 and inner[0].operation == "fusion" and inner[0].operands == given
        return self._fused(inner[0]) if is_call else fused


def array_bytes(shape: str) -> int:
    """Return the bytes of all arrays in a shape that lie in the device's main memory."""
    return sum(
        _bits(dtype) * _elements(dims) // 8
        for dtype, dims, layout in _ARRAY.findall(shape)
        if _is_main(layout)
    )


def dims_of(shape: str) -> list[int]:
    """Return the dims of a shape's first array."""
    found = _ARRAY.search(shape)
    return [int(dim) for dim in found[2].split(",") if dim] if found else []


def _flops(computation: Computation, one: Instruction) -> int:
    """Return the operations of a product or convolution; 0 of anything else."""
    if not one.is_product and one.operation != "convolution":
        return 0
    left, right = (dims_of(computation.instructions[name].result) for name in one.operands[:2])
    added_up = _contracted(one, left) if one.is_product else _window(one, right)
    return 2 * math.prod(dims_of(one.result)) * added_up


def _contracted(dot: Instruction, left: list[int]) -> int:
    dims = _CONTRACTED.search(dot.text)
    return math.prod(left[int(dim)] for dim in re.findall(r"\d+", dims[1])) if dims else 1


def _window(convolution: Instruction, kernel: list[int]) -> int:
    """Return what each result adds up: the kernel's inputs, and its window.

    TPUs' products are convolutions. Where one has a batch, that is a dim of the window over dilated
    numbers, or a reversed one padded by all but one of its size: one place of it is not zero.
    """
    labels = re.search(r"dim_labels=\w+_(\w+)->", convolution.text)
    assert labels is not None, "a convolution says what its dims are"
    added_up = kernel[labels[1].index("i")]
    window = _WINDOW.search(convolution.text)
    parts = dict(part.split("=") for part in window[1].split()) if window else {}
    dims = {key: value.split("x") for key, value in parts.items()}
    for place, size in enumerate(map(int, dims.get("size", ()))):
        pad = dims["pad"][place] if "pad" in dims else "0_0"
        dilation = int(dims["lhs_dilate"][place]) if "lhs_dilate" in dims else 1
        is_reversed = "rhs_reversal" in dims and dims["rhs_reversal"][place] == "1"
        is_batch = is_reversed and pad == f"{size - 1}_{size - 1}"
        added_up *= 1 if is_batch else max(1, size // dilation)
    return added_up


def _arguments(rest: str) -> str:
    """Return what is between an operation's parentheses."""
    depth = 1
    for place, letter in enumerate(rest):
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if not depth:
            return rest[:place]
    return rest


def _constant(one: Instruction) -> int | None:
    found = _CONSTANT.search(f"{one.result} {one.operation}({one.text}")
    return int(found[1]) if found else None


@functools.cache
def _bits(dtype: str) -> int:
    return 8 if dtype == "pred" else int(re.findall(r"\d+", dtype)[0])


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
    # cuBLAS has a workspace beside its result.
    written = one.result.partition(", s8[")[0] if one.target in _CUBLAS else one.result
    return sum(array_bytes(operand) for operand in operands) + array_bytes(written)


def _started_bytes(result: str) -> int:
    """Return the bytes of an asynchronous copy; its result names what it makes, then its source."""
    arrays = _ARRAY.findall(result)[:2]
    moved = min(_elements(dims) for _, dims, _ in arrays)
    return sum(moved * _bits(dtype) // 8 for dtype, _, layout in arrays if _is_main(layout))


def _written_bytes(fused: Computation, one: Instruction) -> int:
    root = fused.instructions[fused.root]
    roots = [root]
    if root.operation == "tuple":
        roots = [fused.instructions[name] for name in root.operands]
    arrays = [f"{dtype}[{dims}]{layout}" for dtype, dims, layout in _ARRAY.findall(one.result)]
    if len(roots) != len(arrays):
        return array_bytes(one.result)
    return sum(
        array_bytes(_updated(fused, made) or array)
        for made, array in zip(roots, arrays, strict=True)
        if array_bytes(array)
    )


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
