"""What a traced function says of mesh axes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.sharding import NamedSharding, PartitionSpec


def equations(jaxpr: Jaxpr) -> Iterator[Any]:
    """Yield every equation, those inside others too."""
    for equation in jaxpr.eqns:
        yield equation
        yield from equations_inside(equation)


def equations_inside(equation: Any) -> Iterator[Any]:
    """Yield the equations of the jaxprs that one holds."""
    for value in _parameters(equation):
        if isinstance(value, ClosedJaxpr):
            yield from equations(value.jaxpr)
        elif isinstance(value, Jaxpr):
            yield from equations(value)


def names_axis(equation: Any, axis: str) -> bool:
    """Say whether an equation lays arrays out over the axis, or runs on each of its shards."""
    specs = (_spec(value) for value in _parameters(equation))
    entries = (entry for spec in specs if spec is not None for entry in spec)
    return any(axis in (e if isinstance(e, tuple) else (e,)) for e in entries)


def takes_axis(equation: Any, axis: str) -> bool:
    """Say whether a shard_map runs on each of the axis' shards, whatever its specs name."""
    # Which parameter holds the axes is not the same in all versions of JAX.
    held = (value for value in equation.params.values() if isinstance(value, frozenset))
    return any(axis in axes for axes in held)


def _parameters(equation: Any) -> Iterator[Any]:
    for value in equation.params.values():
        yield from value if isinstance(value, (list, tuple)) else (value,)


def _spec(value: Any) -> PartitionSpec | None:
    if isinstance(value, NamedSharding):
        return value.spec
    return value if isinstance(value, PartitionSpec) else None
