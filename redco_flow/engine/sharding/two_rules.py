"""Derive tensor-parallel sharding rules from what a function computes: Redco's two rules.

Every parameter gets a PartitionSpec and a reason in Megatron's words: column-parallel,
row-parallel, vocab-parallel or replicated. Names of parameters play no part.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from redco_flow.engine.errors import ShardingError
from redco_flow.engine.sharding.dataflow.handlers import HANDLERS
from redco_flow.engine.sharding.dataflow.trace import trace_function
from redco_flow.engine.sharding.dataflow.values import Dim, Dims, Lookup, Product
from redco_flow.engine.sharding.fused import FusedChoice, choose_fused
from redco_flow.engine.sharding.mesh import MODEL_AXIS
from redco_flow.engine.sharding.rules import (
    Axes,
    ShardingRule,
    ShardingRules,
    check_rules,
    is_bias,
    join,
    named_leaves,
    override_rules,
)
from redco_flow.engine.sharding.splits import Roles, Split, SplitChoice, head_dim, on_one_device

logger = logging.getLogger(__name__)

_RESIDUAL = "the residual stream"

# (params, *inputs) -> anything
TracedFn = Callable[..., Any]


def derive_rules(
    params: Any,
    axis_sizes: Mapping[str, int],
    function: TracedFn | None,
    inputs: Sequence[Any] = (),
    *,
    overrides: Iterable[tuple[str, Axes]] = (),
) -> ShardingRules:
    """Give every parameter a spec with a reason; the user's overrides come first.

    Args:
        params: arrays or shapes.
        axis_sizes: devices along each mesh axis.
        function: (params, *inputs) -> anything: the forward pass or the loss. Traced once, never
            run. Not needed with one model shard.
        inputs: arrays or shapes, in trees; any other Python value is passed as it is.
        overrides: (regex, axes) pairs, as in `[("embedding$", (None, "model"))]`.

    Raises:
        ShardingError: there is no function and several model shards; or an override matches no
            parameter or does not fit one.
    """
    given = override_rules(overrides)
    num_shards = axis_sizes[MODEL_AXIS]
    names = [join(path) for path, _leaf in named_leaves(params)]
    asked = {n: name for n, name in enumerate(names) if not any(r.matches(name) for r in given)}
    if num_shards == 1:
        why = "replicated: one model shard"
        replicated = [
            ShardingRule(name, PartitionSpec(), why, exact=True) for name in asked.values()
        ]
        return check_rules((*given, *replicated), params, axis_sizes)
    if function is None:
        raise ShardingError(
            f"{num_shards} model shards need a layout, and it is derived from what the model "
            "computes: pass sharding_rules=deployer.get_sharding_rules(params, function, "
            "*inputs), for example (params, loss_fn, collate_fn(examples[:2]), None, False)."
        )
    record = read_roles(params, function, inputs).record
    found = choose_fused(record, num_shards, asked, params, function, inputs)
    derived, surprises = [], dict[str, list[str]]()
    for number, name in asked.items():
        if number in found.fused:
            derived.append(_fused_rule(found, number, name))
            continue
        rule, is_expected = _rule(found.choice, number, name)
        derived.append(rule)
        if not is_expected:
            surprises.setdefault(rule.reason, []).append(_described(found.choice, number, name))
    for reason, parameters in surprises.items():
        logger.warning("%s: %s", ", ".join(parameters), reason)
    return check_rules((*given, *derived), params, axis_sizes)


def weight_decay_mask(params: Any, function: TracedFn, *inputs: Any) -> Any:
    """Return a tree of bools: True for what is multiplied with data or looked up.

    Norms, biases and biases per head are False, also biases of experts.

    Args:
        function: see `derive_rules`.
    """
    roles = read_roles(params, function, inputs)
    decayed: set[int] = set()
    for event in roles.events:
        if isinstance(event, Product) or not _is_head_bias(roles, event):
            decayed |= event.sources
    paths = enumerate(path for path, _ in named_leaves(params))
    mask = [number in decayed and not is_bias(path) for number, path in paths]
    return jax.tree.unflatten(jax.tree.structure(params), mask)


def read_roles(params: Any, function: TracedFn, inputs: Sequence[Any]) -> Roles:
    """Trace a function and say what its parameters' dims are for."""
    with on_one_device():
        return Roles(trace_function(function, params, inputs, HANDLERS))


def _is_head_bias(roles: Roles, lookup: Lookup) -> bool:
    columns = roles.flat(lookup.outputs)
    return bool(columns) and all(atom in roles.heads for atom in columns)


def _rule(choice: SplitChoice, number: int, name: str) -> tuple[ShardingRule, bool]:
    """Return a parameter's rule, and whether it is what one would expect."""
    dims = choice.roles.parameters[number]
    for position, dim in enumerate(dims):
        split = choice.split_of(dim)
        if split is not None:
            spec = PartitionSpec(*[None] * position, MODEL_AXIS)
            reason = _reason_split(choice, number, split)
            rule = ShardingRule(name, spec, reason, exact=True, is_padded=split.is_padded)
            return rule, True
    spec, reason, is_expected = _packed(choice, dims) or _whole(choice, number)
    return ShardingRule(name, spec, reason, exact=True), is_expected


def _described(choice: SplitChoice, number: int, name: str) -> str:
    return f"{name} {tuple(choice.roles.size(dim) for dim in choice.roles.parameters[number])}"


def _fused_rule(found: FusedChoice, number: int, name: str) -> ShardingRule:
    choice, fused, part = found.choice, found.fused[number], found.parted.first_part(number)
    dim = choice.roles.parameters[part][fused.position]
    split = next(choice.splits[atom] for atom in dim if atom in choice.splits)
    reason = f"{_reason_split(choice, part, split)}, in each of its {len(fused.parts)} fused parts"
    spec = PartitionSpec(*[None] * fused.position, MODEL_AXIS)
    return ShardingRule(name, spec, reason, exact=True, fused=fused)


def _reason_split(choice: SplitChoice, number: int, split: Split) -> str:
    roles = choice.roles
    counted = f"{roles.size(split.atoms)} {_noun(roles, number, split)}"
    if split.is_padded:
        counted += f", stored padded to a multiple of {choice.num_shards}"
    for event in _events(roles, number):
        if isinstance(event, Lookup):
            if split.atoms[0] in roles.atoms(event.rows):
                return f"embedding lookup: vocab-parallel ({counted})"
        elif split.atoms[0] in roles.flat(event.contracted):
            return f"row-parallel (input sharded over {counted}); one all-reduce follows"
        elif split.atoms[0] in roles.flat(event.outputs):
            return f"column-parallel over {counted}{_beside_residual(choice, event)}"
    return f"sharded like the {counted} that it is combined with elementwise"


def _noun(roles: Roles, number: int, split: Split) -> str:
    """Say what a split counts; several query heads can share a key-value head."""
    if split.atoms[0] not in roles.heads:
        return split.noun
    inside = {head_dim(roles, product) for product in roles.producers[split.atoms[0]]}
    made = roles.producers.keys() - {*split.atoms, *inside, *roles.blocked}
    beside = _beside(roles, number, split.atoms[0])
    return "KV-head groups" if any(atom in made for atom in beside) else split.noun


def _beside(roles: Roles, number: int, atom: int) -> Dim:
    """Return the atoms of a parameter that its products put out, or contract, with this one."""
    own = {atom for dim in roles.parameters[number] for atom in dim}
    for event in _events(roles, number):
        sides = (event.contracted, event.outputs) if isinstance(event, Product) else ()
        for side in map(roles.flat, sides):
            if atom in side:
                return tuple(one for one in side if one in own)
    return tuple(own)


def _beside_residual(choice: SplitChoice, product: Product) -> str:
    """Say what a product reads that is not the residual stream."""
    read = _read(choice, product)
    return "" if read == _RESIDUAL else f" (reads {read})"


def _read(choice: SplitChoice, product: Product) -> str:
    roles = choice.roles
    inputs = roles.flat(product.contracted)
    if any(atom in roles.residual for atom in inputs):
        return _RESIDUAL
    return f"{roles.size(inputs)} replicated inputs"


def _packed(choice: SplitChoice, dims: Dims) -> tuple[PartitionSpec, str, bool] | None:
    """Split a dim in equal pieces of which an inner atom is sharded elsewhere, not its first.

    A replicated kernel would not spare the exchange: XLA splits what it computes all the same.
    """
    for position, dim in enumerate(dims):
        splits = [choice.splits[atom] for atom in dim if atom in choice.splits]
        size = choice.roles.size(dim)
        if not splits or dim[0] in splits[0].atoms or size % choice.num_shards:
            continue
        what, advice = _what_is_packed(choice.roles, dim, splits[0])
        reason = (
            f"{what}: its {size} are cut in {choice.num_shards} equal pieces, "
            f"and activations are exchanged between shards; {advice}"
        )
        return PartitionSpec(*[None] * position, MODEL_AXIS), reason, False
    return None


def _what_is_packed(roles: Roles, dim: Dim, split: Split) -> tuple[str, str]:
    """Say what stands outside of a split in a dim, and what would help."""
    before = dim[: dim.index(split.atoms[0])]
    sharded = f"{roles.size(split.atoms)} {split.noun}"
    if roles.packs(before) or split.noun != "heads":
        advice = "give the parts a dim of their own, as in (width, 3, heads, head dim)"
        return f"packs parts that are each sharded over {sharded}", advice
    num_heads = roles.size((*before, *split.atoms))
    return (
        f"its {num_heads} heads take turns at {sharded} of keys and values that are sharded",
        "let neighbouring heads share keys and values, as in (width, KV heads, heads of each, "
        "head dim)",
    )


def _whole(choice: SplitChoice, number: int) -> tuple[PartitionSpec, str, bool]:
    return PartitionSpec(), *_reason_whole(choice, number)


def _reason_whole(choice: SplitChoice, number: int) -> tuple[str, bool]:
    """Return why a parameter is replicated, and whether that is how it should be."""
    roles, dims = choice.roles, choice.roles.parameters[number]
    events = _events(roles, number)
    products = [event for event in events if isinstance(event, Product)]
    if number not in roles.record.used:
        return "replicated: not used by the traced function", False
    part = next((dim for dim in dims if any(atom in choice.splits for atom in dim)), None)
    if part is not None:
        return _reason_part(choice, part), False
    if products:
        return _reason_product(choice, number, products[0])
    lookup = next((event for event in events if isinstance(event, Lookup)), None)
    if lookup is not None:
        return _reason_table(choice, lookup)
    return _reason_beside(choice, dims), True


def _reason_part(choice: SplitChoice, dim: Dim) -> str:
    """Say why a dim is replicated of which a part is sharded elsewhere."""
    roles, num_shards = choice.roles, choice.num_shards
    split = next(choice.splits[atom] for atom in dim if atom in choice.splits)
    if dim[0] in split.atoms:
        heads = f"{roles.size(split.atoms)} {split.noun}"
        return f"replicated: its {roles.size(dim[:1])} serve {heads} over {num_shards} shards"
    return f"replicated: {num_shards} model shards do not divide the {roles.size(dim)} it packs"


def _reason_product(choice: SplitChoice, number: int, product: Product) -> tuple[str, bool]:
    roles = choice.roles
    own = {atom for dim in roles.parameters[number] for atom in dim}
    outputs = [atom for atom in roles.flat(product.outputs) if atom in own]
    if heads := [atom for atom in outputs if atom in roles.heads and atom not in choice.splits]:
        return f"replicated: {_undivided(choice, heads)}", False
    whys = [why for atom in outputs if (why := choice.why_whole(atom))]
    if not whys:
        return f"replicated: reads {_read(choice, product)}, has no output to shard", True
    # Experts' routers, and what writes a residual stream from replicated inputs, are replicated.
    is_small = roles.size(outputs) <= roles.size(roles.flat(product.contracted)) // 8
    return f"replicated: reads {_read(choice, product)}, its output is {'; '.join(whys)}", is_small


def _undivided(choice: SplitChoice, heads: Sequence[int]) -> str:
    """Say that the model shards do not divide the heads, and which numbers of shards would."""
    sizes = [choice.roles.size((atom,)) for atom in heads]
    fitting = {n for size in sizes for n in range(2, size + 1) if size % n == 0}
    advice = f"{', '.join(map(str, sorted(fitting)))} would" if fitting else "none would"
    count = choice.roles.size(heads)
    return f"{count} heads, which {choice.num_shards} model shards do not divide; {advice}"


def _reason_table(choice: SplitChoice, lookup: Lookup) -> tuple[str, bool]:
    if not lookup.by_tokens:
        return "replicated: its rows are selected by computed positions", True
    rows = choice.roles.atoms(lookup.rows)
    whys = [why for atom in rows if (why := choice.why_whole(atom))]
    reason = f"embedding lookup, replicated: {'; '.join(whys) or 'its rows cannot be sharded'}"
    return reason, "small" in reason


def _reason_beside(choice: SplitChoice, dims: Dims) -> str:
    whys = [why for dim in dims for atom in dim if (why := choice.why_whole(atom))]
    if not whys:
        return "replicated: combined with nothing that is sharded"
    return f"replicated: lies along {whys[-1]}"


def _events(roles: Roles, number: int) -> list[Product | Lookup]:
    return [event for event in roles.events if number in event.sources]
