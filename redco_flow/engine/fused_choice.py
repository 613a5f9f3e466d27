"""Find kernels that fuse several parts in one dim, each of which is to be split by itself.

Such a kernel is stored with its columns sorted by shard if the function takes the parts apart again
before anything else looks along them, which a second trace tells.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import jax

from redco_flow.engine.dataflow.trace import function_jaxpr
from redco_flow.engine.dataflow.values import Record
from redco_flow.engine.fused_parts import FusedParts
from redco_flow.engine.fused_use import compute_by_shard
from redco_flow.engine.parts_apart import PartedRecord, take_apart
from redco_flow.engine.split_choice import Choice, choose_splits
from redco_flow.engine.split_roles import Roles, on_one_device


@dataclass(frozen=True)
class FusedChoice:
    """What is split, parts of fused kernels by themselves.

    Args:
        parted: what `choice` was made of.
        fused: by the parameter's number.
    """

    choice: Choice
    parted: PartedRecord
    fused: dict[int, FusedParts]


def choose_fused(
    record: Record,
    num_shards: int,
    numbers: Collection[int],
    params: Any,
    function: Callable[..., Any],
    inputs: Sequence[Any],
) -> FusedChoice:
    """Choose what is split; along parts of several sizes only where all of them can be.

    Args:
        numbers: of the parameters that may be stored sorted by shard.
        params, function, inputs: what was traced.
    """
    refused: set[int] = set()
    while True:
        parted = take_apart(record, refused)
        choice = choose_splits(Roles(parted.record), num_shards)
        fused = {n: parts for n in numbers if (parts := _read_fused(choice, parted, n))}
        fused = _keep_fit(fused, params, function, inputs)
        real = range(len(record.parameters))
        failed = {parted.apart[n].cut for n in real if n in parted.apart and n not in fused}
        if not failed:
            return FusedChoice(choice, parted, fused)
        refused |= failed


def _keep_fit(
    fused: dict[int, FusedParts], params: Any, function: Callable[..., Any], inputs: Sequence[Any]
) -> dict[int, FusedParts]:
    """Keep those whose parts the function takes apart before it looks along their columns."""
    count = len(jax.tree.leaves(params))
    while fused:
        unfit: set[int] = set()
        in_order = [fused.get(number) for number in range(count)]
        with on_one_device():
            function_jaxpr(compute_by_shard(function, in_order, unfit.update), params, inputs)
        if not unfit:
            break
        # A kernel that needs its own order leaves its bias without a partner: look again.
        fused = {number: parts for number, parts in fused.items() if number not in unfit}
    return fused


def _read_fused(choice: Choice, parted: PartedRecord, number: int) -> FusedParts | None:
    for place in range(len(choice.roles.parameters[number])):
        parts = _read_parts(choice, parted, number, place)
        if len(parts) > 1:
            return FusedParts(place, parts, choice.num_shards)
    return None


def _read_parts(choice: Choice, parted: PartedRecord, number: int, place: int) -> tuple[int, ...]:
    """Return the sizes of a dim's parts that are each split; () where one of them is not."""
    apart = parted.apart.get(number)
    if apart is not None and apart.place == place:
        found = [_read_parts(choice, parted, part, place) for part in apart.numbers]
        return tuple(chain(*found)) if all(found) else ()
    roles, dim = choice.roles, choice.roles.parameters[number][place]
    first = next((place for place, atom in enumerate(dim) if atom in choice.splits), None)
    split = None if first is None else choice.split_of(dim[first:])
    if split is None or split.is_padded:
        return ()
    return (roles.size(dim[first:]),) * roles.size(dim[:first])
