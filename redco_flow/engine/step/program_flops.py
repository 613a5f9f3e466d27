"""Count what a compiled program multiplies, from the text of its optimized HLO.

Walks the computations from the entry, a loop's body as often as the loop turns: XLA's own count has
it once. The operations of kernels (Pallas, Triton, cuDNN) are not in the text: their runs are
counted instead.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from redco_flow.engine.step.seldom import turns_seldom

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")
_SHAPE = re.compile(r"\b(?:pred|[a-z]+\d+(?:e\dm\d\w*)?)\[([\d,]*)\]")
_CALLED = re.compile(r"\b(?:calls|to_apply)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
_WHILE = re.compile(r"\bbody=%?([\w.\-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_TARGET = re.compile(r'custom_call_target="([^"]+)"')
_OPERAND = re.compile(r"%([\w.\-]+)")
_WINDOW = re.compile(r"window=\{([^}]*)\}")


@dataclass(frozen=True)
class Instruction:
    """One instruction: its name, result, operation, operands, and the text behind these."""

    name: str
    result: str
    operation: str
    operands: tuple[str, ...]
    text: str


@dataclass
class Computation:
    """Its instructions by name, and which is the root."""

    instructions: dict[str, Instruction] = field(default_factory=dict)
    root: str = ""


class UnknownLoop(ValueError):
    """A loop with products in it has a number of turns that is not in the program."""


def read_computations(text: str) -> tuple[dict[str, Computation], str]:
    """Return a module's computations by name, and which one is its entry."""
    found: dict[str, Computation] = {}
    entry, current = "", Computation()
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            current = found[header[1]] = Computation()
            entry = header[1] if line.startswith("ENTRY") else entry
        elif instruction := _INSTRUCTION.match(line):
            is_root, name, result, operation, rest = instruction.groups()
            operands = tuple(_OPERAND.findall(_arguments(rest)))
            current.instructions[name] = Instruction(name, result, operation, operands, rest)
            current.root = name if is_root else current.root
    return found, entry


def product_flops(text: str) -> int:
    """Return the operations of one run's products on one device, two for each that is added up.

    Raises:
        UnknownLoop: they are not known.
    """
    computations, entry = read_computations(text)
    total = 0
    for computation, one, count in _runs(computations, entry, 1):
        flops = flops_of(computation, one)
        if flops and count is None:
            raise UnknownLoop(f"{one.name} is in a loop of unknown length")
        total += flops * (count or 0)
    return total


def kernel_runs(text: str) -> dict[str, int]:
    """Return how often each kind of custom call runs; a loop of unknown length counts once."""
    found: Counter[str] = Counter()
    for _, one, count in _runs(*read_computations(text), 1):
        if one.operation == "custom-call" and (target := _TARGET.search(one.text)):
            found[target[1]] += 1 if count is None else count
    return dict(found)


def _runs(
    computations: dict[str, Computation], name: str, count: int | None
) -> Iterator[tuple[Computation, Instruction, int | None]]:
    """Yield what runs, inside of fusions too, with where it is and how often; None: unknown."""
    computation = computations[name]
    for one in computation.instructions.values():
        yield computation, one, count
        for called, times in _called(one):
            inner = None if count is None or times is None else count * times
            yield from _runs(computations, called, inner)


def _called(one: Instruction) -> Iterator[tuple[str, int | None]]:
    if one.operation == "while" and (body := _WHILE.search(one.text)):
        turns = _TRIPS.search(one.text)
        if not turns_seldom(one.text):  # the usual run's count
            yield body[1], int(turns[1]) if turns else None
    elif one.operation in ("call", "fusion", "async-start"):
        yield from ((name, 1) for name in _CALLED.findall(one.text))
    elif one.operation == "conditional":
        for each in _BRANCHES.findall(one.text):
            yield from ((name.strip().lstrip("%"), 1) for name in each.split(","))


def flops_of(computation: Computation, one: Instruction) -> int:
    """Return the operations of a product or convolution; 0 of anything else."""
    if one.operation not in ("dot", "convolution"):
        return 0
    left, right = (_dims(computation.instructions[name].result) for name in one.operands[:2])
    added_up = _contracted(one, left) if one.operation == "dot" else _window(one, right)
    return 2 * math.prod(_dims(one.result)) * added_up


def _contracted(dot: Instruction, left: list[int]) -> int:
    dims = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", dot.text)
    return math.prod(left[int(dim)] for dim in dims[1].split(",") if dim) if dims else 1


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


def _dims(shape: str) -> list[int]:
    found = _SHAPE.search(shape)
    return [int(dim) for dim in found[1].split(",") if dim] if found else []


def _arguments(rest: str) -> str:
    """Return what is between an operation's parentheses."""
    depth = 1
    for place, letter in enumerate(rest):
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if not depth:
            return rest[:place]
    return rest
