"""Values of the dataflow analysis: facts about an array inside a trace, and what a trace finds.

Knows atoms and records.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, IntEnum

Dim = tuple[int, ...]


class Atoms:
    """All atoms of one trace."""

    def __init__(self) -> None:
        self._sizes: list[int] = []
        # What an atom became: None is itself, one part is a merge, more parts are a refinement.
        self._parts: list[Dim | None] = []

    def new_dim(self, size: int) -> Dim:
        """Return a dim that is not known to be any other."""
        return () if size == 1 else (self._new(size),)

    def new_dims(self, shape: Iterable[int]) -> tuple[Dim, ...]:
        """Return one new dim per size."""
        return tuple(self.new_dim(size) for size in shape)

    def expand(self, dim: Iterable[int]) -> Dim:
        """Return the atoms that a dim consists of by now."""
        return tuple(part for atom in dim for part in self._expand(atom))

    def _expand(self, atom: int) -> Dim:
        found: list[int] = []
        rest = [atom]
        while rest:
            parts = self._parts[one := rest.pop()]
            if parts is None:
                found.append(one)
            else:
                rest.extend(reversed(parts))
        if self._parts[atom] is not None:
            self._parts[atom] = tuple(found)  # found at once from now on
        return tuple(found)

    def size(self, dim: Iterable[int]) -> int:
        """Return the number of indices of a dim."""
        return math.prod(self._sizes[atom] for atom in dim)

    def unify(self, one: Dim, other: Dim) -> bool:
        """Learn that two dims are the same; False where their factors do not fit each other."""
        while True:
            one, other = self.expand(one), self.expand(other)
            while one and other and one[0] == other[0]:
                one, other = one[1:], other[1:]
            if not one or not other:
                return not one and not other
            if not self._align(one[0], other[0]):
                return False

    def regroup(self, dim: Dim, sizes: Sequence[int]) -> tuple[Dim, ...] | None:
        """Cut a dim into dims of these sizes; None where its factors do not allow it."""
        found = []
        for size in sizes:
            taken = self._take(dim, size)
            if taken is None:
                return None
            dim = self.expand(dim)[len(taken) :]
            found.append(taken)
        return tuple(found)

    def _new(self, size: int) -> int:
        self._sizes.append(size)
        self._parts.append(None)
        return len(self._sizes) - 1

    def _align(self, one: int, other: int) -> bool:
        """Merge two atoms, or the smaller with the major part of the larger."""
        large, small = (one, other) if self._sizes[one] >= self._sizes[other] else (other, one)
        if self._sizes[small] == 0 and self._sizes[large] > 0:
            return False
        if self._sizes[small] == 0:
            self._parts[large] = (small,)
            return True
        factor, remainder = divmod(self._sizes[large], self._sizes[small])
        if remainder:
            return False
        self._parts[large] = (small,) if factor == 1 else (small, self._new(factor))
        return True

    def _take(self, dim: Dim, size: int) -> Dim | None:
        """Return the major atoms of a dim that make up `size`, refining the last one."""
        dim, count = self.expand(dim), 0
        while size > 1:
            if count == len(dim):
                return None
            atom = dim[count]
            if self._sizes[atom] > size and self._sizes[atom] % size == 0:
                self._parts[atom] = (self._new(size), self._new(self._sizes[atom] // size))
                return (*self.expand(dim[:count]), *self.expand((atom,))[:1])
            if size % self._sizes[atom]:
                return None
            size //= self._sizes[atom]
            count += 1
        return dim[:count]


Dims = tuple[Dim, ...]


class Kind(IntEnum):
    """The origin of an array; of several, the largest."""

    CONSTANT = 0
    PARAMETER = 1
    DATA = 2


class Fact(Enum):
    """An operation along a dim. The value is its name in messages, as in "it is ..."."""

    LAYER = "counts layers"
    SLICED = "cut into parts"
    JOINED = "put together from parts"
    SORTED = "sorted or accumulated along"
    SELECTED = "selected from by index"
    MIXED = "reshaped across its parts"
    ATTENDED = "contracted between activations (a head's dim)"
    EXPERTS = "routed to (experts)"
    OPAQUE = "used by an operation whose dataflow is not known"
    BATCH = "a batch dim of a product of activations (heads)"


@dataclass(frozen=True)
class Value:
    """An array.

    Args:
        dims: its atoms.
        is_token: whether its integers come with the inputs and were only moved, shifted or
            clipped since.
        is_one_hot: whether it marks where tokens equal the indices of its last dim.
        events: bits of the products it depends on.
        sources: the parameters (by number) it is computed from, while it is no data.
        array: its number, where a walk numbers arrays.
    """

    dims: Dims
    kind: Kind = Kind.CONSTANT
    is_token: bool = False
    is_one_hot: bool = False
    events: int = 0
    sources: frozenset[int] = frozenset()
    array: int = -1

    def with_dims(self, dims: Dims) -> Value:
        """Return the same with other dims."""
        return replace(self, dims=dims)


@dataclass(frozen=True)
class Product:
    """Data multiplied by parameters.

    Args:
        bit: its position in `Value.events`.
        after: the products that its data depends on.
        contracted: the dims that data and parameters share and that are summed.
        outputs: the parameters' other dims, except batch dims.
    """

    bit: int
    after: int
    sources: frozenset[int]
    contracted: Dims
    outputs: Dims


@dataclass(frozen=True)
class Lookup:
    """Rows of a parameter, selected by index.

    Args:
        by_tokens: whether the index is the model's integer input; else it is computed.
        rows: the dim that is indexed.
        outputs: the dims that a row has.
    """

    sources: frozenset[int]
    by_tokens: bool
    rows: Dim
    outputs: Dims


@dataclass(frozen=True)
class Cut:
    """A dim that was cut into parts of several sizes, side by side.

    Args:
        parts: in order; together they are the whole.
    """

    whole: Dim
    sizes: tuple[int, ...]
    parts: Dims


@dataclass
class Record:
    """The findings of a trace.

    Args:
        parameters: each parameter's dims, in the tree's order.
        events: products and lookups in the order in which they happen.
        cuts: dims cut into parts of several sizes; equal parts have an atom that numbers them.
    """

    atoms: Atoms = field(default_factory=Atoms)
    parameters: list[Dims] = field(default_factory=list)
    used: set[int] = field(default_factory=set)
    facts: dict[Fact, list[Dim]] = field(default_factory=dict)
    opaque: dict[Dim, str] = field(default_factory=dict)
    events: list[Product | Lookup] = field(default_factory=list)
    cuts: list[Cut] = field(default_factory=list)
    _num_products: int = 0

    def add_fact(self, fact: Fact, *dims: Dim) -> None:
        """Note that something was done along dims."""
        self.facts.setdefault(fact, []).extend(dims)

    def unify(self, one: Value, other: Value) -> None:
        """Learn that two arrays have the same dims."""
        for a, b in zip(one.dims, other.dims, strict=True):
            self.unify_dims(a, b)

    def unify_dims(self, one: Dim, other: Dim) -> None:
        """Learn that two dims are the same; where their factors clash, note that."""
        # A dim of size 1 is broadcast against any.
        if one and other and not self.atoms.unify(one, other):
            self.add_fact(Fact.MIXED, one, other)

    def cut(self, dim: Dim, sizes: tuple[int, ...]) -> Dims:
        """Return a dim's parts of these sizes: the same for the same dim."""
        whole = self.atoms.expand(dim)
        for known in self.cuts:
            if known.sizes == sizes and self.atoms.expand(known.whole) == whole:
                return known.parts
        self.cuts.append(Cut(dim, sizes, self.atoms.new_dims(sizes)))
        return self.cuts[-1].parts

    def add_product(
        self, sources: frozenset[int], data: Value, contracted: Dims, outputs: Dims
    ) -> int:
        """Note a product and return its bit."""
        self._num_products += 1
        bit = 1 << self._num_products
        self.events.append(Product(bit, data.events, sources, contracted, outputs))
        return bit


def join_values(values: list[Value], dims: Dims) -> Value:
    """Return what is computed from several arrays, with these dims."""
    kind = max((value.kind for value in values), default=Kind.CONSTANT)
    events, sources = 0, frozenset[int]()
    for value in values:
        events |= value.events
        sources |= value.sources
    if kind is not Kind.PARAMETER:
        sources = frozenset()
    return Value(dims, kind, events=events, sources=sources)
