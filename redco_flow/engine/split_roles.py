"""What role each dim of a traced function plays: residual stream, heads, hidden units.

Reads a trace's record; decides what may not be split, and why. Knows no shards.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType

from redco_flow.engine.dataflow.atoms import Dim
from redco_flow.engine.dataflow.values import Dims, Fact, Lookup, Product, Record
from redco_flow.engine.mesh import MESH_AXES

_BLOCKING = (
    Fact.LAYER,
    Fact.EXPERTS,
    Fact.ATTENDED,
    Fact.SORTED,
    Fact.SLICED,
    Fact.JOINED,
    Fact.MIXED,
)


@dataclass(frozen=True)
class Roles:
    """A record, read."""

    record: Record

    @cached_property
    def parameters(self) -> tuple[Dims, ...]:
        """Each parameter's dims as atoms."""
        return tuple(tuple(map(self.atoms, dims)) for dims in self.record.parameters)

    @cached_property
    def events(self) -> list[Product | Lookup]:
        """Products and lookups in order; a parameter that is used again says nothing new."""
        first: dict[tuple[object, ...], Product | Lookup] = {}
        for event in self.record.events:
            if isinstance(event, Product):
                key: tuple[object, ...] = (event.sources, self.flat(event.contracted))
            else:
                key = (event.sources, self.atoms(event.rows), event.by_tokens)
            first.setdefault(key, event)
        return list(first.values())

    @cached_property
    def products(self) -> list[Product]:
        """All products, in order."""
        return [event for event in self.events if isinstance(event, Product)]

    @cached_property
    def producers(self) -> dict[int, list[Product]]:
        """The products that have an atom in their outputs."""
        return _by_atom((atom, p) for p in self.products for atom in self.flat(p.outputs))

    @cached_property
    def consumers(self) -> dict[int, list[Product]]:
        """The products that contract an atom."""
        return _by_atom((atom, p) for p in self.products for atom in self.flat(p.contracted))

    @cached_property
    def heads(self) -> frozenset[int]:
        """Atoms that products make and along which activations meet pairwise."""
        batch = self._facts.get(Fact.BATCH, set())
        return frozenset(a for a in batch if a in self.producers and a not in self._blocked_by_use)

    @cached_property
    def residual(self) -> frozenset[int]:
        """Atoms that products contract and that later products make again."""
        return frozenset(
            atom
            for atom in self.producers.keys() & self.consumers.keys() - self.heads
            if any(
                made is taken or made.after & taken.bit
                for taken in self.consumers[atom]
                for made in self.producers[atom]
            )
        )

    @cached_property
    def blocked(self) -> dict[int, str]:
        """Atoms that are never split, and what they are."""
        width = {a: f"the residual stream ({self.size((a,))} wide)" for a in self.residual}
        return {**self._blocked_by_use, **width}

    def atoms(self, dim: Iterable[int]) -> Dim:
        """Return a dim's atoms."""
        return self.record.atoms.expand(dim)

    def flat(self, dims: Dims) -> Dim:
        """Return the atoms of several dims."""
        return tuple(atom for dim in dims for atom in self.atoms(dim))

    def size(self, dim: Iterable[int]) -> int:
        """Return a dim's size."""
        return self.record.atoms.size(dim)

    def without_parts(self, dim: Dim) -> Dim:
        """Return a dim's atoms behind those that number parts cut from each other."""
        cut, count = self._facts.get(Fact.SLICED, set()), 0
        while count < len(dim) - 1 and dim[count] in cut:
            count += 1
        return dim[count:]

    @cached_property
    def _facts(self) -> dict[Fact, set[int]]:
        return {
            fact: {atom for dim in dims for atom in self.atoms(dim)}
            for fact, dims in self.record.facts.items()
        }

    @cached_property
    def _blocked_by_use(self) -> dict[int, str]:
        blocked: dict[int, str] = {}
        for dim, name in self.record.opaque.items():
            for atom in self.atoms(dim):
                blocked[atom] = f"a dim used by '{name}', whose dataflow is not known"
        for fact in _BLOCKING:
            for atom in self._facts.get(fact, ()):
                blocked.setdefault(atom, f"a dim {fact.value}")
        for atom in self._facts.get(Fact.SELECTED, ()):
            # Numbers picked from the last result are few; those on the way would be exchanged.
            if atom in self.consumers:
                blocked.setdefault(atom, f"a dim {Fact.SELECTED.value}")
        return blocked


def on_one_device() -> AbstractContextManager[Any]:
    """Trace as on a mesh of one device: a function may name axes, and takes its unsharded path."""
    num_axes = len(MESH_AXES)
    mesh = AbstractMesh((1,) * num_axes, MESH_AXES, axis_types=(AxisType.Auto,) * num_axes)
    context: AbstractContextManager[Any] = jax.sharding.use_abstract_mesh(mesh)
    return context


def _by_atom(pairs: Iterable[tuple[int, Product]]) -> dict[int, list[Product]]:
    found: dict[int, list[Product]] = {}
    for atom, product in pairs:
        if product not in found.setdefault(atom, []):
            found[atom].append(product)
    return found
