"""Choose which dims are split over the model shards: the two rules along the dataflow.

Products are visited in the order in which the function computes them:

1. Column-parallel: one whose input is replicated is sharded on its output side: heads before all
   else, then hidden units, then final outputs, which no later product reads (the vocabulary).
2. Row-parallel: one whose input arrives sharded is sharded on its input side; one all-reduce
   follows.

Embedding tables, looked up by the inputs' integers, are vocab-parallel. Nothing is split that
`Roles.blocked` names, nothing inside a head.
Source: Redco (arXiv 2310.16355), section 3.2; differs: by dataflow instead of by name and order.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType

from redco_flow.engine.sharding.dataflow.values import Dim, Dims, Fact, Lookup, Product, Record
from redco_flow.engine.sharding.mesh import MESH_AXES

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
        """Atoms that products contract and that later products make again.

        But for the inner width of a state-space block, of which a few numbers are computed (the
        step size) that then meet it again: split, it costs all-reduces of these few alone.
        """
        return frozenset(atom for atom in self._loops if not self._is_inner_width(atom))

    @cached_property
    def _loops(self) -> dict[int, list[tuple[Product, Product]]]:
        """By atom: a product that contracts it, and one that makes it again from the result."""
        loops = {
            atom: [
                (taken, made)
                for taken in self.consumers[atom]
                for made in self.producers[atom]
                if made is taken or made.after & taken.bit
            ]
            for atom in self.producers.keys() & self.consumers.keys() - self.heads
        }
        return {atom: found for atom, found in loops.items() if found}

    def _is_inner_width(self, atom: int) -> bool:
        """Whether an atom's loops all lead through fewer numbers, inside a loop of another's."""
        loops, size = self._loops[atom], self.size((atom,))
        return all(self.size(self.flat(taken.outputs)) < size for taken, _ in loops) and any(
            all(any(_surrounds(outer, loop) for outer in others) for loop in loops)
            for other, others in self._loops.items()
            if other != atom
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

    def are_parts(self, dim: Dim) -> bool:
        """Say whether a dim numbers parts that are cut from each other, as q, k and v."""
        return bool(dim) and set(dim) <= self._facts.get(Fact.SLICED, set())

    def counts_layers(self, dim: Dim) -> bool:
        """Say whether a dim numbers layers, also where there is one."""
        return set(dim) <= self._facts.get(Fact.LAYER, set())

    def without_parts(self, dim: Dim) -> Dim:
        """Return a dim's atoms behind those that number parts cut from each other."""
        cut, count = self._facts.get(Fact.SLICED, set()), 0
        while count < len(dim) - 1 and dim[count] in cut:
            count += 1
        return dim[count:]

    def packs(self, atoms: Iterable[int]) -> bool:
        """Whether one of these numbers parts that were cut from each other, or put together.

        Copies of key-value heads that are put together number the queries that share each.
        """
        facts = self._facts
        parts = facts.get(Fact.SLICED, set()) | facts.get(Fact.JOINED, set())
        return any(atom in parts - facts.get(Fact.BATCH, set()) for atom in atoms)

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


def _surrounds(outer: tuple[Product, Product], inner: tuple[Product, Product]) -> bool:
    """Whether one loop begins before and ends after another."""
    return bool(inner[0].after & outer[0].bit and outer[1].after & inner[1].bit)


def _by_atom(pairs: Iterable[tuple[int, Product]]) -> dict[int, list[Product]]:
    found: dict[int, list[Product]] = {}
    for atom, product in pairs:
        if product not in found.setdefault(atom, []):
            found[atom].append(product)
    return found


@dataclass(frozen=True)
class Split:
    """Adjacent atoms that are split together.

    Args:
        noun: what they count, for people.
        is_padded: whether the shards do not divide them, so that arrays are stored padded.
    """

    atoms: Dim
    noun: str
    is_padded: bool = False


@dataclass
class SplitChoice:
    """The atoms that are split over `num_shards`, and the others with the reason.

    Args:
        replicated: atoms that are not split, and why.
    """

    roles: Roles
    num_shards: int
    splits: dict[int, Split] = field(default_factory=dict)
    replicated: dict[int, str] = field(default_factory=dict)

    def split_of(self, dim: Dim) -> Split | None:
        """Return how a dim is split: by what begins it."""
        split = self.splits.get(dim[0]) if dim else None
        return split if split and dim[: len(split.atoms)] == split.atoms else None

    def why_whole(self, atom: int) -> str | None:
        """Return why an atom is not split."""
        return self.roles.blocked.get(atom) or self.replicated.get(atom)


def choose_splits(roles: Roles, num_shards: int) -> SplitChoice:
    """Apply the two rules."""
    choice = SplitChoice(roles, num_shards)
    for product in roles.products:
        for atom in roles.flat(product.outputs):
            is_divided = atom in roles.heads and roles.size((atom,)) % num_shards == 0
            if is_divided and not _is_in_group(roles, atom, num_shards):
                _add(choice, Split((atom,), "heads"))
    for event in roles.events:
        if isinstance(event, Lookup):
            _choose_rows(choice, event)
        else:
            _choose_units(choice, event)
    return choice


def _is_in_group(roles: Roles, atom: int, num_shards: int) -> bool:
    """Whether an atom numbers neighbouring query heads that share a key-value head.

    Its dims have the key-value heads before it, which keys and values have without it. Split
    together, the two give each shard neighbouring heads, where the shards divide the key-value
    heads or the other way round.
    """
    dims = [dim for parameter in roles.parameters for dim in parameter]
    behind = {dim[: dim.index(atom)][-1:] for dim in dims if atom in dim}
    if len(behind) != 1:
        return False
    shared = next(iter(behind))
    return (
        bool(shared)
        and 0 in (num_shards % roles.size(shared), roles.size(shared) % num_shards)
        and shared[0] in roles.heads
        and any(shared[0] in dim and atom not in dim for dim in dims)
    )


def _add(choice: SplitChoice, split: Split) -> None:
    for atom in split.atoms:
        choice.splits.setdefault(atom, split)


def _choose_rows(choice: SplitChoice, lookup: Lookup) -> None:
    roles, rows = choice.roles, choice.roles.atoms(lookup.rows)
    columns = roles.flat(lookup.outputs)
    if not lookup.by_tokens or not rows or choice.split_of(rows):
        return
    if any(atom in choice.splits for atom in columns) or choice.why_whole(rows[0]):
        return
    size = roles.size(rows)
    if size <= roles.size(columns):
        choice.replicated[rows[0]] = f"the {size} rows of a small table"
    elif roles.size(rows[:1]) % choice.num_shards == 0:
        _add(choice, Split(rows[:1], "rows"))
    else:
        _pad(choice, rows, "rows")


def _choose_units(choice: SplitChoice, product: Product) -> None:
    roles = choice.roles
    inputs, outputs = roles.flat(product.contracted), roles.flat(product.outputs)
    if any(atom in choice.splits for atom in inputs):
        for atom in outputs:
            if atom not in choice.splits:
                choice.replicated.setdefault(atom, "a dim that an all-reduce has replicated")
        return
    if any(atom in choice.splits for atom in outputs):
        return
    dims = _output_dims(choice, product)
    for dim in dims:
        atoms = _divisible(choice, dim)
        if atoms and not _would_conflict(choice, product, atoms):
            _add(choice, Split(atoms, _noun_of_part(choice, dim, atoms)))
            return
    for dim in dims:
        is_last = not any(atom in roles.consumers for atom in dim)
        if is_last and roles.size(dim) > max(roles.size(inputs), choice.num_shards):
            _pad(choice, dim, "final outputs")


def _output_dims(choice: SplitChoice, product: Product) -> list[Dim]:
    """List the dims of the product's parameters that it puts out and that may be split.

    Of parts fused in one dim, what each of them has.
    """
    roles = choice.roles
    outputs = set(roles.flat(product.outputs))
    inside_head = head_dim(roles, product)
    dims = [
        dim
        for number in sorted(product.sources)
        for dim in map(roles.without_parts, roles.parameters[number])
        if dim and dim[0] in outputs and dim[0] != inside_head and not choice.why_whole(dim[0])
    ]
    return sorted(dims, key=lambda dim: dim[0] not in roles.heads)


def head_dim(roles: Roles, product: Product) -> int | None:
    """Return the dim inside a head, where the product makes heads."""
    outputs = roles.flat(product.outputs)
    batch = {a for dim in roles.record.facts.get(Fact.BATCH, ()) for a in roles.atoms(dim)}
    others = [atom for atom in outputs if atom not in batch]
    return others[-1] if others and len(others) < len(outputs) else None


def _divisible(choice: SplitChoice, dim: Dim) -> Dim:
    """Return the atoms that begin a dim and that the shards divide; () where they do not."""
    roles, num_shards = choice.roles, choice.num_shards
    size = roles.size(dim[:1])
    if size % num_shards == 0:
        return dim[:1]
    # Grouped queries: each group's heads over several shards.
    rest, remainder = divmod(num_shards, size)
    has_second = len(dim) > 1 and not choice.why_whole(dim[1])
    if has_second and not remainder and roles.size(dim[1:2]) % rest == 0:
        return dim[:2]
    choice.replicated.setdefault(
        dim[0], f"{_counted(choice, dim[:1])}, which {num_shards} model shards do not divide"
    )
    return ()


def _would_conflict(choice: SplitChoice, product: Product, atoms: Dim) -> bool:
    """Whether what takes these atoms in is better split, or can only be split, otherwise."""
    roles = choice.roles
    if atoms[0] in roles.heads:
        return False
    for consumer in roles.consumers.get(atoms[0], ()):
        outputs = roles.flat(consumer.outputs)
        others = [a for a in roles.flat(consumer.contracted) if a not in atoms]
        takes_split = any(
            dim[: len(atoms)] == atoms for n in consumer.sources for dim in roles.parameters[n]
        )
        is_taken = any(atom in choice.splits for atom in (*outputs, *others))
        if is_taken or not takes_split or _is_bottleneck(choice, product, consumer, atoms):
            choice.replicated.setdefault(atoms[0], "a dim that a product sharded otherwise reads")
            return True
    return False


def _is_bottleneck(choice: SplitChoice, product: Product, consumer: Product, atoms: Dim) -> bool:
    """Whether a narrow dim (a low rank) lies between two wide ones, the second to be split."""
    roles, size = choice.roles, choice.roles.size(atoms)
    free = [a for a in roles.flat(consumer.outputs) if not choice.why_whole(a)]
    return size < roles.size(roles.flat(product.contracted)) and size < roles.size(free)


def _pad(choice: SplitChoice, dim: Dim, noun: str) -> None:
    """Split a dim that the shards do not divide, where it is always a dim of its own."""
    roles = choice.roles
    is_alone = len(dim) == 1 and all(
        one == dim for dims in roles.parameters for one in dims if dim[0] in one
    )
    if is_alone:
        choice.replicated.pop(dim[0], None)
        _add(choice, Split(dim, noun, is_padded=True))


def _noun(choice: SplitChoice, atoms: Dim) -> str:
    roles = choice.roles
    if any(atom in roles.heads for atom in atoms):
        return "heads"
    return "units" if atoms[0] in roles.consumers else "final outputs"


def _noun_of_part(choice: SplitChoice, dim: Dim, atoms: Dim) -> str:
    """Name what a dim's major atoms count, which may be groups of what the dim counts."""
    noun, inside = _noun(choice, atoms), choice.roles.size(dim[len(atoms) :])
    return noun if noun == "heads" or inside == 1 else f"groups of {inside} {noun}"


def _counted(choice: SplitChoice, atoms: Dim) -> str:
    return f"{choice.roles.size(atoms)} {_noun(choice, atoms)}"
