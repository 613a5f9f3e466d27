"""Multiply rows sorted by group by each group's own kernel: `jax.lax.ragged_dot`, in loops.

On CPUs that multiplies every row by every kernel, E times the work. Here one loop runs over groups
and one inside it over a group's blocks of rows, as many as there are: shapes are static, sizes are
not. A group's last block reaches into the next group's rows, which are masked.
Seen by `benchmarks/kept_files.py --file grouped_product` on two cores, CPU time of a Mixtral's
training step with `ragged_dot` over ours (quartiles): 2.36 (2.29, 2.40); memory 206 MiB, ours 91.
Dims in this file: R rows, E groups, X contracted, Y a kernel's outputs, b rows of a block.
Source: Gale et al. 2023, MegaBlocks; differs: in loops, without padding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap

from redco_flow.models.projections import product

Operands = tuple[jax.Array, jax.Array, jax.Array]

# Small blocks read the kernel too often, large ones waste rows that other groups own.
_FEWEST_ROWS, _MOST_ROWS = 64, 1024
_BLOCKS_PER_GROUP = 4


class _Block(NamedTuple):
    """Adjacent rows: where they begin, and which of them belong to the group at hand, (b,)."""

    start: jax.Array
    is_own: jax.Array

    def read(self, rows: jax.Array) -> jax.Array:
        """Return the block's part (b, …) of rows (R, …)."""
        part: jax.Array = jax.lax.dynamic_slice_in_dim(rows, self.start, len(self.is_own))
        return part

    def own_or(self, part: jax.Array, other: jax.Array | float) -> jax.Array:
        """Return own rows from a block's part, the others from `other`."""
        is_own = self.is_own.reshape(-1, *[1] * (part.ndim - 1))
        return jnp.where(is_own, part, other)

    def write(self, rows: jax.Array, part: jax.Array) -> jax.Array:
        """Return rows (R, …) with own rows from a block's part."""
        mixed = self.own_or(part, self.read(rows))
        written: jax.Array = jax.lax.dynamic_update_slice_in_dim(rows, mixed, self.start, 0)
        return written


@jax.custom_vjp
def grouped_product(x: jax.Array, kernels: jax.Array, ends: jax.Array) -> jax.Array:
    """Multiply rows (R, X) by their groups' kernels (E, X, *Y): (R, *Y).

    Kernels' gradients are summed over blocks in float32.

    Args:
        ends: int32 (E,), where each group's rows end, which begin where the one before ends; the
            last is R.
    """
    multiplied: jax.Array = _multiply(x, kernels, ends)
    return multiplied


# Under `vmap` one after the other: a batched while_loop selects between all old and all new rows in
# every iteration.
@sequential_vmap
def _multiply(x: jax.Array, kernels: jax.Array, ends: jax.Array) -> jax.Array:
    num_rows = _block_rows(len(x), len(kernels))

    def run_group(
        outputs: jax.Array, group: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[jax.Array, None]:
        kernel, start, end = group

        def run_block(block: _Block, outputs: jax.Array) -> jax.Array:
            return block.write(outputs, product(block.read(x), kernel))

        return _over_blocks(run_block, outputs, start, end, len(x), num_rows), None

    outputs = jax.lax.full_like(x, 0, shape=(len(x), *kernels.shape[2:]))
    outputs, _ = jax.lax.scan(run_group, outputs, (kernels, _starts(ends), ends))
    return outputs


def _forward(x: jax.Array, kernels: jax.Array, ends: jax.Array) -> tuple[jax.Array, Operands]:
    return grouped_product(x, kernels, ends), (x, kernels, ends)


def _backward(operands: Operands, cotangent: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    return *_gradients(*operands, cotangent), None


@sequential_vmap
def _gradients(
    x: jax.Array, kernels: jax.Array, ends: jax.Array, cotangent: jax.Array
) -> tuple[jax.Array, jax.Array]:
    num_rows = _block_rows(len(x), len(kernels))

    def run_group(
        to_x: jax.Array, group: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        kernel, start, end = group

        def run_block(
            block: _Block, gradients: tuple[jax.Array, jax.Array]
        ) -> tuple[jax.Array, jax.Array]:
            to_x, to_kernel = gradients
            _, pull_back = jax.vjp(product, block.read(x), kernel)
            to_part, added = pull_back(block.own_or(block.read(cotangent), 0))
            return block.write(to_x, to_part), to_kernel + added

        zeros = jax.lax.full_like(kernel, 0, dtype=jnp.float32)
        to_x, to_kernel = _over_blocks(run_block, (to_x, zeros), start, end, len(x), num_rows)
        return to_x, to_kernel.astype(kernel.dtype)

    groups = (kernels, _starts(ends), ends)
    to_x, to_kernels = jax.lax.scan(run_group, jax.lax.full_like(x, 0), groups)
    return to_x, to_kernels


grouped_product.defvjp(_forward, _backward)


def _over_blocks(
    run_block: Callable[[_Block, Any], Any],
    carry: Any,
    start: jax.Array,
    end: jax.Array,
    length: int,
    num_rows: int,
) -> Any:
    """Carry something through the blocks of the rows from `start` to `end`, of `length`."""

    def run(state: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
        first, carry = state
        # The last rows of all are read in a block that reaches back.
        place = jnp.minimum(first, length - num_rows)
        rows = place + jnp.arange(num_rows)
        block = _Block(place, (rows >= first) & (rows < end))
        return first + num_rows, run_block(block, carry)

    return jax.lax.while_loop(lambda state: state[0] < end, run, (start, carry))[1]


def _block_rows(length: int, num_groups: int) -> int:
    """Return how many rows a block has: a power of two, or all that there are."""
    share = max(length // (num_groups * _BLOCKS_PER_GROUP), 1)
    power = 1 << (share.bit_length() - 1)
    return min(max(power, _FEWEST_ROWS), _MOST_ROWS, length)


def _starts(ends: jax.Array) -> jax.Array:
    return jnp.concatenate([jnp.zeros_like(ends[:1]), ends[:-1]])
