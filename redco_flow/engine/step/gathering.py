"""All-gather parameters that are sharded over `fsdp` where a function uses them, not before.

Left to itself the compiler may split the products instead, and move activations. Gathered copies
are not kept for the backward pass, which gathers again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from redco_flow.engine.sharding.mesh import FSDP_AXIS
from redco_flow.engine.sharding.rules import mesh_axes
from redco_flow.engine.sharding.storage import PaddedStorage
from redco_flow.engine.step.deferred import Deferred, Keeping, run_deferred


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
            function, params, jax.tree.leaves(params), splits, inputs, keeping=_GatheringAgain()
        )

    return gathering


class _GatheringAgain(Keeping):
    """Keep what would be kept anyway, except gathered parameters."""

    decides: ClassVar[bool] = True

    def surround(self, function: Callable[..., Any], *, in_loop: bool) -> Callable[..., Any]:
        again: Callable[..., Any] = jax.checkpoint(
            function, policy=_except_gathered(None), prevent_cse=not in_loop
        )
        return again

    def again(
        self, function: Callable[..., Any], *, is_surrounded: bool, **options: Any
    ) -> Callable[..., Any]:
        """Return it with its own policy in force."""
        policy = options["policy"]
        if policy is not None:
            policy = _except_gathered(policy)
        again = jax.checkpoint(function, **{**options, "policy": policy})
        return _sealed(again) if is_surrounded else again


# What gathers, and what lays the same numbers out anew: from what is split it is had again.
_LAYOUT = frozenset(
    (
        "sharding_constraint", "broadcast_in_dim", "concatenate", "expand_dims", "reshape", "rev",
        "slice", "split", "squeeze", "transpose",
    )
)  # fmt: skip


def _except_gathered(policy: Callable[..., Any] | None) -> Callable[..., Any]:
    """Return the policy (None: keep everything) that keeps no gathered parameter."""

    def is_kept(primitive: Any, *args: Any, **params: Any) -> Any:
        if str(primitive) in _LAYOUT:
            return False
        return True if policy is None else policy(primitive, *args, **params)

    return is_kept


def _sealed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let what the function keeps for its backward pass be its own policies' choice.

    JAX asks the policy of the outermost `jax.checkpoint` alone, but a derivative that was written
    out keeps what it says it keeps.
    """

    @jax.custom_vjp
    def sealed(*values: Any) -> Any:
        return function(*values)

    def forward(*inputs: Any) -> tuple[Any, Any]:
        values = [one.value for one in inputs]
        moved = [number for number, one in enumerate(inputs) if one.perturbed]

        def of_moved(*some: Any) -> Any:
            given = dict(zip(moved, some, strict=True))
            return function(*(given.get(number, value) for number, value in enumerate(values)))

        results, pull_back = jax.vjp(of_moved, *(values[number] for number in moved))
        return results, (pull_back, _Places(len(values), tuple(moved)))

    def backward(kept: Any, cotangents: Any) -> tuple[Any, ...]:
        pull_back, places = kept
        found = pull_back(jax.tree.map(_filled, cotangents, is_leaf=_is_zero))
        given = dict(zip(places.moved, found, strict=True))
        return tuple(given.get(number) for number in range(places.count))

    sealed.defvjp(forward, backward, symbolic_zeros=True)
    return sealed


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Places:
    """Which of a function's inputs were differentiated."""

    count: int
    moved: tuple[int, ...]


def _is_zero(cotangent: Any) -> bool:
    return isinstance(cotangent, jax.custom_derivatives.SymbolicZero)


def _filled(cotangent: Any) -> Any:
    if not _is_zero(cotangent):
        return cotangent
    if cotangent.dtype == jax.dtypes.float0:
        return np.zeros(cotangent.shape, cotangent.dtype)
    return jnp.zeros(cotangent.shape, cotangent.dtype)
