"""All-gather parameters that are sharded over `fsdp` where a function uses them, not before.

Where they are sharded over `context` as well, over both at once.

Rows that are looked up in a table whose columns are split are exchanged (all-to-all), and not the
table: each device looks its columns up for all devices' rows, and has its columns' gradient alone.
What the function asks to be split over `fsdp` otherwise, as the loss does a head, is exchanged too.

Left to itself the compiler may split the products instead, and move activations. Gathered copies
are not kept for the backward pass, which gathers again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec

from redco_flow.engine.sharding.mesh import (
    CONTEXT_AXIS,
    DATA_AXIS,
    FSDP_AXIS,
    is_mapped,
    names_axis,
)
from redco_flow.engine.sharding.shared_inputs import SharedInputs
from redco_flow.engine.sharding.storage import PaddedStorage
from redco_flow.engine.step.deferred import Deferred, Keeping, Outcome, bind, run_deferred


@dataclass(frozen=True)
class _Split(Deferred):
    """An array that is split over fsdp, alone or with context."""

    sharding: NamedSharding
    # Gathered after a cast: fewer bytes where it narrows.
    casts_first: ClassVar[bool] = True

    def use(self, value: Any) -> jax.Array:
        """Bring it together over fsdp; its gradient is split again."""
        mesh, spec = self.sharding.mesh, self.sharding.spec
        target = PartitionSpec(*(None if is_over_fsdp(axis) else axis for axis in spec))
        gathered: jax.Array = jax.lax.with_sharding_constraint(
            self.split(value), NamedSharding(mesh, target)
        )
        return gathered

    def split(self, value: Any) -> jax.Array:
        """Keep it split; its gradient is split again."""
        kept: jax.Array = jax.lax.with_sharding_constraint(value, self.sharding)
        return kept

    def row(self) -> Deferred | None:
        """One entry lies as all do, unless the first dim is split itself."""
        first, *rest = self.sharding.spec
        if first is not None:
            return None
        return _Split(NamedSharding(self.sharding.mesh, PartitionSpec(*rest)))

    def through(
        self,
        equation: Any,
        values: Sequence[Any],
        deferred: Sequence[Deferred | None],
        shared: SharedInputs,
    ) -> list[Outcome] | None:
        """Let what needs no more than each device's part have that.

        It is split again over fsdp where the function constrains it, and rows are looked up in each
        device's columns where they are fewer than the table's.
        """
        if equation.primitive.name == "transpose":
            transposed = _Transposed(self, tuple(equation.params["permutation"]))
            return [(values[0], transposed)]
        if _lays_out(equation):
            return [(bind(equation, [self.split(values[0])])[0], None)]
        return self._look_up(equation, values, deferred)

    def _look_up(
        self, equation: Any, values: Sequence[Any], deferred: Sequence[Deferred | None]
    ) -> list[Outcome] | None:
        if deferred[1:] != [None] * len(deferred[1:]) or not _looks_rows_up(equation):
            return None
        (shape,) = (v.aval.shape for v in equation.outvars)
        num_table_rows = equation.invars[0].aval.shape[0]
        columns = (*self.sharding.spec, None)[1]
        looked_up = _LookedUp(self.sharding, len(shape))
        if not is_over_fsdp(columns) or shape[0] % looked_up.num_row_shards:
            return None
        if math.prod(shape[:-1]) // looked_up.num_row_shards >= num_table_rows:
            return None
        (rows,) = bind(equation, [self.split(values[0]), *values[1:]])
        return [(looked_up.split_columns(rows), looked_up)]


@dataclass(frozen=True)
class _Transposed(Deferred):
    """An array that is split over fsdp, to be transposed once it is gathered."""

    array: _Split
    permutation: tuple[int, ...]
    casts_first: ClassVar[bool] = True

    def use(self, value: Any) -> jax.Array:
        """Bring it together, and transpose it."""
        return jnp.transpose(self.array.use(value), self.permutation)

    def row(self) -> Deferred | None:
        """All are made ready at once."""
        return None

    def through(
        self,
        equation: Any,
        values: Sequence[Any],
        deferred: Sequence[Deferred | None],
        shared: SharedInputs,
    ) -> list[Outcome] | None:
        """Split it again over fsdp where the function constrains it."""
        if not _lays_out(equation):
            return None
        transposed = jnp.transpose(self.array.split(values[0]), self.permutation)
        return [(bind(equation, [transposed])[0], None)]


@dataclass(frozen=True)
class _LookedUp(Deferred):
    """Rows of a table (B, ..., D) of which each device has its columns.

    Args:
        table: its sharding (V, D), the columns over fsdp, alone or with context.
        ndim: of the rows.
    """

    table: NamedSharding
    ndim: int
    casts_first: ClassVar[bool] = True

    @property
    def num_row_shards(self) -> int:
        """Among how many devices B is split."""
        return math.prod(self.table.mesh.shape[axis] for axis in self._row_axes())

    def split_columns(self, rows: Any) -> jax.Array:
        """Lay them out as they are looked up: all rows of fsdp's devices, one device's columns."""
        others = [axis for axis in self._row_axes() if axis not in self._column_axes()]
        return self._placed(rows, others, None, self._column_axes())

    def use(self, value: Any) -> jax.Array:
        """Exchange columns for rows, and their gradients' rows for columns."""
        sequence = CONTEXT_AXIS if CONTEXT_AXIS in self._column_axes() else None
        rows: jax.Array = self.split_columns(value)
        return self._placed(rows, self._row_axes(), sequence, ())

    def row(self) -> Deferred | None:
        """All are made ready at once."""
        return None

    def _row_axes(self) -> tuple[str, ...]:
        """Name the axes of B; where `data` is mapped, its shards hold no others' rows."""
        return (FSDP_AXIS,) if is_mapped(DATA_AXIS) else (DATA_AXIS, FSDP_AXIS)

    def _column_axes(self) -> tuple[str, ...]:
        axes = self.table.spec[-1]
        return axes if isinstance(axes, tuple) else (axes,)

    def _placed(
        self, rows: Any, row_axes: Sequence[str], sequence: str | None, columns: Sequence[str]
    ) -> jax.Array:
        free = PartitionSpec.UNCONSTRAINED
        between = [sequence or free, *[free] * (self.ndim - 3)] if self.ndim > 2 else []
        spec = PartitionSpec(tuple(row_axes) or None, *between, tuple(columns) or free)
        placed: jax.Array = jax.lax.with_sharding_constraint(
            rows, NamedSharding(self.table.mesh, spec)
        )
        return placed


def _lays_out(equation: Any) -> bool:
    """Say whether an operation splits its operand over fsdp."""
    return equation.primitive.name == "sharding_constraint" and names_axis(equation, FSDP_AXIS)


def _looks_rows_up(equation: Any) -> bool:
    """Say whether an operation takes whole rows of its first operand (V, D) by number."""
    if equation.primitive.name != "gather":
        return False
    table, (out,) = equation.invars[0].aval, equation.outvars
    dims = equation.params["dimension_numbers"]
    return (
        table.ndim == 2
        and out.aval.ndim > 1
        and tuple(dims.start_index_map) == tuple(dims.collapsed_slice_dims) == (0,)
        and tuple(dims.offset_dims) == (out.aval.ndim - 1,)
        and tuple(equation.params["slice_sizes"]) == (1, table.shape[1])
    )


def gather_where_used(function: Callable[..., Any], params: PaddedStorage) -> Callable[..., Any]:
    """Return `function(params, *inputs)` that gathers its parameters one by one.

    Args:
        function: its inputs are trees of arrays and Python values; those are passed as they are.
        params: how the parameters lie.
    """
    splits = [
        _Split(sharding) if any(map(is_over_fsdp, sharding.spec)) else None
        for sharding in jax.tree.leaves(params.stored_sharding)
    ]
    if not any(splits):
        return function

    def gathering(params: Any, *inputs: Any) -> Any:
        return run_deferred(
            function, params, jax.tree.leaves(params), splits, inputs, keeping=_GatheringAgain()
        )

    return gathering


def is_over_fsdp(axes: Any) -> bool:
    """Say whether a dim with these mesh axes is split over fsdp."""
    return axes == FSDP_AXIS or (isinstance(axes, tuple) and FSDP_AXIS in axes)


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

    def results(self, values: list[Any]) -> list[Any]:
        """Return them as they are, but for a name.

        Inside of `jax.checkpoint` JAX keeps what a scan carries after every turn for the sake of
        what it carries last. Of an operation that is no scan it keeps the result.
        """
        named: list[Any] = checkpoint_name(values, "scan")
        return named


# Primitives that gather, or that lay out the same numbers again: recomputed from the parts.
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
        return results, (pull_back, _Positions(len(values), tuple(moved)))

    def backward(kept: Any, cotangents: Any) -> tuple[Any, ...]:
        pull_back, positions = kept
        found = pull_back(jax.tree.map(_filled, cotangents, is_leaf=_is_zero))
        given = dict(zip(positions.moved, found, strict=True))
        return tuple(given.get(number) for number in range(positions.count))

    sealed.defvjp(forward, backward, symbolic_zeros=True)
    return sealed


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Positions:
    """Positions of a function's differentiated inputs."""

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
