"""The order in which stages can run, and the circles that keep them from it.

Pure graph work on names: the same graph in the same order always gives the same answer.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence


def order_of(names: Sequence[str], upstream: Mapping[str, set[str]]) -> list[str]:
    """Return the names so that each comes after those it needs; else in the given order.

    Names that stand in a circle, or need one that does, are left out.
    """
    place = {name: index for index, name in enumerate(names)}
    missing = {name: len(upstream[name]) for name in names}
    downstream: dict[str, list[str]] = {name: [] for name in names}
    for name in names:
        for needed in upstream[name]:
            downstream[needed].append(name)
    ready = [place[name] for name in names if not missing[name]]
    ordered = []
    while ready:
        name = names[heapq.heappop(ready)]
        ordered.append(name)
        for waiting in downstream[name]:
            missing[waiting] -= 1
            if not missing[waiting]:
                heapq.heappush(ready, place[waiting])
    return ordered


def cycles_of(names: Sequence[str], upstream: Mapping[str, set[str]]) -> list[list[str]]:
    """Return circles of names, each begun by its first; none shares a name with another."""
    ordered = set(order_of(names, upstream))
    left = [name for name in names if name not in ordered]
    cycles = []
    while left:
        path = [left[0]]
        while True:
            needed = next((name for name in left if name in upstream[path[-1]]), None)
            if needed is None:
                left = [name for name in left if name != path[-1]]
                break
            if needed in path:
                cycle = path[path.index(needed) :]
                start = cycle.index(min(cycle, key=names.index))
                cycles.append([*cycle[start:], *cycle[:start]])
                left = [name for name in left if name not in cycle]
                break
            path.append(needed)
    return cycles
