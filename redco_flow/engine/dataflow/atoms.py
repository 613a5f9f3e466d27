"""Dims as products of atoms: which dims of which arrays are the same, and how they split.

A dim is a tuple of atoms, major to minor; a dim of size 1 has none. An atom stands for one range
of indices wherever it occurs. Learning that two dims are the same merges their atoms; learning
that a dim of 12 is also (3, 4) refines its atom everywhere. Old tuples stay valid: `expand` says
what they stand for by now. Knows sizes alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

Dim = tuple[int, ...]


class Atoms:
    """All atoms of one trace."""

    def __init__(self) -> None:
        self._sizes: list[int] = []
        # What an atom became: None is itself, one part is a merge, two parts a refinement.
        self._parts: list[Dim | None] = []

    def new_dim(self, size: int) -> Dim:
        """Return a dim that is not known to be any other."""
        return () if size == 1 else (self._new(size),)

    def new_dims(self, shape: Iterable[int]) -> tuple[Dim, ...]:
        """Return one new dim per size."""
        return tuple(self.new_dim(size) for size in shape)

    def expand(self, dim: Iterable[int]) -> Dim:
        """Return the atoms that a dim consists of by now."""
        found: list[int] = []
        rest = list(reversed(tuple(dim)))
        while rest:
            atom = rest.pop()
            parts = self._parts[atom]
            if parts is None:
                found.append(atom)
            else:
                rest.extend(reversed(parts))
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
