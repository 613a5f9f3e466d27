"""Which calls can stand in a cluster's queue as one array: they ask for the same and wait alike.

Each call has a number, the same in every stage of a sweep, so that a call can wait for the one of
its number in another array instead of for the whole array. Pure; knows no cluster.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from redco_flow.launch.call import JobResources

DEFAULT_MAX_ARRAY_SIZE = 1001
"""Slurm's own, where its operator has set none."""


@dataclass(frozen=True)
class QueuedCall:
    """A call that is to be submitted together with others.

    Args:
        number: its own among all that may stand in one array.
        upstream: ids of jobs that must have completed before; of an array's task `ARRAY_TASK`.
    """

    number: int
    resources: JobResources
    upstream: tuple[str, ...] = ()


@dataclass(frozen=True)
class CallGroup:
    """Calls that one submission brings into the queue: an array, or an ordinary job for one.

    Args:
        numbers: of the calls, ascending.
        tasks: of the same calls, their tasks' numbers in the array.
        upstream: ids of jobs that each of them waits for.
        aligned: ids of arrays; each call waits for the task there that has its own task's number.
    """

    numbers: tuple[int, ...]
    tasks: tuple[int, ...]
    resources: JobResources
    upstream: tuple[str, ...]
    aligned: tuple[str, ...]

    @property
    def is_array(self) -> bool:
        """Whether it is more than one call."""
        return len(self.numbers) > 1


def group_calls(
    calls: Iterable[QueuedCall], *, max_array_size: int = DEFAULT_MAX_ARRAY_SIZE
) -> list[CallGroup]:
    """Return the groups, in the order of their first calls; each call is in one of them.

    Args:
        calls: no two with one number. One that is an array itself stays alone.
        max_array_size: tasks have numbers below it; 1 or less: there are no arrays.
    """
    size = max(max_array_size, 1)
    found: dict[object, list[QueuedCall]] = {}
    for call in sorted(calls, key=lambda one: one.number):
        alone = call.number if call.resources.shards else None
        key = (call.number // size, call.resources, _waits(call, size), alone)
        found.setdefault(key, []).append(call)
    return [_group(members, size) for members in found.values()]


def _group(members: list[QueuedCall], size: int) -> CallGroup:
    first = members[0]
    upstream, aligned = _waits(first, size) if len(members) > 1 else (first.upstream, ())
    numbers = tuple(call.number for call in members)
    tasks = tuple(number % size for number in numbers)
    return CallGroup(numbers, tasks, first.resources, upstream, aligned)


def _waits(call: QueuedCall, size: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The jobs that a call waits for, and the arrays in which it waits for its own number."""
    own = f"_{call.number % size}"
    upstream = tuple(one for one in call.upstream if not one.endswith(own))
    aligned = tuple(one.removesuffix(own) for one in call.upstream if one.endswith(own))
    return upstream, aligned
