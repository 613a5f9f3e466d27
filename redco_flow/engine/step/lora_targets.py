"""Find the kernels that low-rank factors are trained beside, by what a function computes with them.

Dims in this file: R rank.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from redco_flow.engine.errors import EngineError
from redco_flow.engine.sharding.dataflow.values import Lookup, Product
from redco_flow.engine.sharding.rules import is_bias, join, named_leaves
from redco_flow.engine.sharding.splits import Roles

ALL_LINEAR = "all-linear"
"""As `targets`: every kernel but what is looked up and what gives scores of a vocabulary."""

LETTERS = "abcdefghijklmnopq"
_RANK = "r"

Parts = tuple[int, tuple[int, ...]]
"""The position of the dim that numbers a kernel's parts (q, k, v), and the numbers of some."""


@dataclass(frozen=True)
class LoraTarget:
    """A kernel with factors, and its dims' positions: A is (*stack, *inputs, R), B (*stack, R,
    *outputs), and DoRA's magnitudes have the kernel's dims without its inputs, in their order.

    Args:
        parts: the parts of the kernel that have factors, which are one dim of the stack; None: all.
    """

    path: str
    stack: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    parts: Parts | None = None

    def separated(self, parts: Sequence[int]) -> LoraTarget:
        """Return it with factors of its own for each part that some of its outputs number."""
        stack = tuple(sorted((*self.stack, *parts)))
        outputs = tuple(position for position in self.outputs if position not in parts)
        return replace(self, stack=stack, outputs=outputs)

    def only(self, parts: Parts | None) -> LoraTarget:
        """Return it with factors for some parts alone; None: for the whole kernel."""
        if parts is None:
            return self
        position, _ = parts
        apart = self if position in self.stack else self.separated([position])
        return replace(apart, parts=parts)

    def sizes(self, positions: Sequence[int], shape: Sequence[int]) -> tuple[int, ...]:
        """Return the sizes of a factor's dims, given positions and the shape of the kernel's."""
        position, numbers = (None, ()) if self.parts is None else self.parts
        return tuple(len(numbers) if at == position else shape[at] for at in positions)

    @property
    def equation(self) -> str:
        """The einsum from A and B to the kernel's dims."""
        names = {
            position: LETTERS[position] for position in (*self.stack, *self.inputs, *self.outputs)
        }

        def spell(positions: Sequence[int]) -> str:
            return "".join(names[position] for position in positions)

        first = spell(self.stack) + spell(self.inputs) + _RANK
        second = spell(self.stack) + _RANK + spell(self.outputs)
        return f"{first},{second}->{spell(sorted(names))}"

    @property
    def magnitudes(self) -> tuple[int, ...]:
        """The positions of the kernel's dims that magnitudes have."""
        return tuple(sorted((*self.stack, *self.outputs)))

    @property
    def stacked_dims(self) -> dict[str, tuple[int, ...]]:
        """The dims of A, B and magnitudes that are the stack's."""
        leading = tuple(range(len(self.stack)))
        of_outputs = enumerate(self.magnitudes)
        magnitudes = tuple(position for position, at in of_outputs if at in self.stack)
        return {"a": leading, "b": leading, "m": magnitudes}


def choose_kernels(
    kernels: Sequence[LoraTarget],
    targets: str | None,
    named: Mapping[str, Parts | None],
    left_out: Callable[[], set[str]],
) -> tuple[LoraTarget, ...]:
    """Return the kernels that get factors.

    Args:
        left_out: () -> paths of those that `ALL_LINEAR` does not mean.
    """
    try:
        pattern = re.compile(targets or "")
    except re.error as error:
        raise EngineError(f"lora targets={targets!r} is not a regex: {error}.") from error
    by_path = {kernel.path: kernel for kernel in kernels}
    if unknown := sorted(set(named) - set(by_path)):
        raise EngineError(
            f"lora: {', '.join(unknown)} cannot have factors: nothing is multiplied with it, or it "
            f"is trained in full; kernels: {', '.join(by_path)}."
        )
    if targets == ALL_LINEAR:
        chosen = set(by_path) - left_out()
    else:
        chosen = {path for path in by_path if targets is not None and pattern.search(path)}
    return tuple(
        kernel if path in chosen else kernel.only(named[path])
        for path, kernel in by_path.items()
        if path in chosen or path in named
    )


def kernels_of_vocabularies(kernels: Sequence[LoraTarget], params: Any, roles: Roles) -> set[str]:
    """Paths of tables that tokens are looked up in, and of kernels with an output for each row."""
    leaves = [(join(path), leaf.shape) for path, leaf in named_leaves(params)]
    shapes, tables, sizes = dict(leaves), set(), set()
    for number, event in _lookups(roles):
        if event.by_tokens:
            path, shape = leaves[number]
            dims = enumerate(roles.parameters[number])
            tables.add(path)
            sizes |= {shape[at] for at, dim in dims if set(dim) & set(event.rows)}
    heads = {
        one.path
        for one in kernels
        if not one.stack and sizes & {shapes[one.path][at] for at in one.outputs}
    }
    return tables | heads


def looked_up(params: Any, roles: Roles) -> set[str]:
    """Paths of the parameters whose rows are taken by numbers."""
    paths = [join(path) for path, _ in named_leaves(params)]
    return {paths[number] for number, _ in _lookups(roles)}


def _lookups(roles: Roles) -> Iterator[tuple[int, Lookup]]:
    for event in roles.events:
        if isinstance(event, Lookup):
            for number in event.sources:
                yield number, event


def kernels_of_experts(kernels: Sequence[LoraTarget], params: Any, roles: Roles) -> set[str]:
    """Paths of those that are stacked along more than layers and parts such as q, k and v."""
    numbers = {join(path): number for number, (path, _) in enumerate(named_leaves(params))}

    def is_stacked_further(kernel: LoraTarget) -> bool:
        dims = roles.parameters[numbers[kernel.path]]
        return not all(
            roles.counts_layers(dims[at]) or roles.are_parts(dims[at]) for at in kernel.stack
        )

    return {kernel.path for kernel in kernels if is_stacked_further(kernel)}


def find_kernels(params: Any, roles: Roles, *, separate: bool) -> list[LoraTarget]:
    """List the parameters that data is multiplied with, by what their first product does.

    Biases of experts are not among them.
    """
    leaves = named_leaves(params)
    paths = [join(path) for path, _ in leaves]
    biases = {number for number, (path, _) in enumerate(leaves) if is_bias(path)}
    found: dict[int, LoraTarget] = {}
    for event in roles.events:
        if not isinstance(event, Product):
            continue
        summed, made = set(roles.flat(event.contracted)), set(roles.flat(event.outputs))
        for number in event.sources - set(found) - biases:
            dims = list(enumerate(roles.parameters[number]))
            inner = tuple(position for position, dim in dims if dim and set(dim) <= summed)
            outer = tuple(position for position, dim in dims if dim and set(dim) <= made)
            stack = tuple(position for position, _ in dims if position not in (*inner, *outer))
            if inner and outer:
                target = LoraTarget(paths[number], stack, inner, outer)
                parts = [at for at in outer if roles.are_parts(roles.parameters[number][at])]
                is_apart = separate and len(parts) < len(outer)
                found[number] = target.separated(parts) if is_apart else target
    return [found[number] for number in sorted(found)]
