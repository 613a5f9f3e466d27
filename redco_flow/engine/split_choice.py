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

from dataclasses import dataclass, field

from redco_flow.engine.dataflow.atoms import Dim
from redco_flow.engine.dataflow.values import Fact, Lookup, Product
from redco_flow.engine.split_roles import Roles


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
class Choice:
    """What is split over `num_shards`, and what is not and why.

    Args:
        whole: atoms that are not split, and why.
    """

    roles: Roles
    num_shards: int
    splits: dict[int, Split] = field(default_factory=dict)
    whole: dict[int, str] = field(default_factory=dict)

    def split_of(self, dim: Dim) -> Split | None:
        """Return how a dim is split: by what begins it."""
        split = self.splits.get(dim[0]) if dim else None
        return split if split and dim[: len(split.atoms)] == split.atoms else None

    def why_whole(self, atom: int) -> str | None:
        """Return why an atom is not split."""
        return self.roles.blocked.get(atom) or self.whole.get(atom)


def choose_splits(roles: Roles, num_shards: int) -> Choice:
    """Apply the two rules."""
    choice = Choice(roles, num_shards)
    for product in roles.products:
        for atom in roles.flat(product.outputs):
            if atom in roles.heads and roles.size((atom,)) % num_shards == 0:
                _add(choice, Split((atom,), "heads"))
    for event in roles.events:
        if isinstance(event, Lookup):
            _choose_rows(choice, event)
        else:
            _choose_units(choice, event)
    return choice


def _add(choice: Choice, split: Split) -> None:
    for atom in split.atoms:
        choice.splits.setdefault(atom, split)


def _choose_rows(choice: Choice, lookup: Lookup) -> None:
    roles, rows = choice.roles, choice.roles.atoms(lookup.rows)
    columns = roles.flat(lookup.outputs)
    if not lookup.by_tokens or not rows or choice.split_of(rows):
        return
    if any(atom in choice.splits for atom in columns) or choice.why_whole(rows[0]):
        return
    size = roles.size(rows)
    if size <= roles.size(columns):
        choice.whole[rows[0]] = f"the {size} rows of a small table"
    elif roles.size(rows[:1]) % choice.num_shards == 0:
        _add(choice, Split(rows[:1], "rows"))
    else:
        _pad(choice, rows, "rows")


def _choose_units(choice: Choice, product: Product) -> None:
    roles = choice.roles
    inputs, outputs = roles.flat(product.contracted), roles.flat(product.outputs)
    if any(atom in choice.splits for atom in inputs):
        for atom in outputs:
            if atom not in choice.splits:
                choice.whole.setdefault(atom, "a dim that an all-reduce has made whole")
        return
    if any(atom in choice.splits for atom in outputs):
        return
    dims = _output_dims(choice, product)
    for dim in dims:
        atoms = _divisible(choice, dim)
        if atoms and not _would_conflict(choice, product, atoms):
            _add(choice, Split(atoms, _noun(choice, atoms)))
            return
    for dim in dims:
        is_last = not any(atom in roles.consumers for atom in dim)
        if is_last and roles.size(dim) > max(roles.size(inputs), choice.num_shards):
            _pad(choice, dim, "final outputs")


def _output_dims(choice: Choice, product: Product) -> list[Dim]:
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


def _divisible(choice: Choice, dim: Dim) -> Dim:
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
    choice.whole.setdefault(
        dim[0], f"{_counted(choice, dim[:1])}, which {num_shards} model shards do not divide"
    )
    return ()


def _would_conflict(choice: Choice, product: Product, atoms: Dim) -> bool:
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
            choice.whole.setdefault(atoms[0], "a dim that a product sharded otherwise reads")
            return True
    return False


def _is_bottleneck(choice: Choice, product: Product, consumer: Product, atoms: Dim) -> bool:
    """Whether a narrow dim (a low rank) lies between two wide ones, the second to be split."""
    roles, size = choice.roles, choice.roles.size(atoms)
    free = [a for a in roles.flat(consumer.outputs) if not choice.why_whole(a)]
    return size < roles.size(roles.flat(product.contracted)) and size < roles.size(free)


def _pad(choice: Choice, dim: Dim, noun: str) -> None:
    """Split a dim that the shards do not divide, where it is always a dim of its own."""
    roles = choice.roles
    is_alone = len(dim) == 1 and all(
        one == dim for dims in roles.parameters for one in dims if dim[0] in one
    )
    if is_alone:
        choice.whole.pop(dim[0], None)
        _add(choice, Split(dim, noun, is_padded=True))


def _noun(choice: Choice, atoms: Dim) -> str:
    roles = choice.roles
    if any(atom in roles.heads for atom in atoms):
        return "heads"
    return "units" if atoms[0] in roles.consumers else "final outputs"


def _counted(choice: Choice, atoms: Dim) -> str:
    return f"{choice.roles.size(atoms)} {_noun(choice, atoms)}"
