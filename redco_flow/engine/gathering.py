"""Gather parameters that lie split over `fsdp` where a function uses them, and not before.

Left to itself the compiler may split the products instead, and move activations. Gathered copies
are not kept for the backward pass, which gathers again. Knows shardings; refuses to know models.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
from jax.sharding import NamedSharding, PartitionSpec

from redco_flow.engine.deferred import Deferred, run_deferred
from redco_flow.engine.mesh import FSDP_AXIS
from redco_flow.engine.padded_storage import PaddedStorage
from redco_flow.engine.sharding import mesh_axes


@dataclass(frozen=True)
class _Split(Deferred):
    """An array that is split over fsdp."""

    sharding: NamedSharding
    # Gathered after a cast: fewer bytes where it narrows.
    casts_first: ClassVar[bool] = True

    def use(self, value: Any) -> jax.Array:
        """Bring it together over fsdp; its gradient is split again."""
        mesh, spec = self.sharding.mesh, self.sharding.spec
        whole = PartitionSpec(*(None if axis == FSDP_AXIS else axis for axis in spec))
        kept = jax.lax.with_sharding_constraint(value, self.sharding)
        gathered: jax.Array = jax.lax.with_sharding_constraint(kept, NamedSharding(mesh, whole))
        return gathered

    def row(self) -> Deferred | None:
        """One entry lies as all do, unless the first dim is split itself."""
        first, *rest = self.sharding.spec
        if first is not None:
            return None
        return _Split(NamedSharding(self.sharding.mesh, PartitionSpec(*rest)))


def gather_where_used(function: Callable[..., Any], params: PaddedStorage) -> Callable[..., Any]:
    """Return `function(params, *inputs)` that gathers its parameters one by one.

    Args:
        function: its inputs are trees of arrays and Python values; those are passed as they are.
        params: how the parameters lie.
    """
    splits = [
        _Split(sharding) if FSDP_AXIS in mesh_axes(sharding.spec) else None
        for sharding in jax.tree.leaves(params.stored_sharding)
    ]
    if not any(splits):
        return function

    def gathering(params: Any, *inputs: Any) -> Any:
        return run_deferred(
            function, params, jax.tree.leaves(params), splits, inputs, wrap=_gathering_again
        )

    return gathering


def _gathering_again(function: Callable[..., Any], *, in_loop: bool = False) -> Callable[..., Any]:
    """Keep for the backward pass what would be kept anyway, except gathered parameters."""

    def is_kept(primitive: Any, *_: Any, **__: Any) -> bool:
        return str(primitive) != "sharding_constraint"

    again: Callable[..., Any] = jax.checkpoint(function, policy=is_kept, prevent_cse=not in_loop)
    return again
