"""Blocks of tokens in Triton's attention, and the blocks that each program visits.

A program of the grid holds a block of queries, or of keys, and walks over the blocks of the other
side: those that order and window let it see, and of packed rows those of its own documents.
Dims in this file: B batch, Q queries, M keys, H heads, K head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from redco_flow.models.attention.kernel_calls import HIDDEN

# Triton's products have no shorter dim.
MIN_BLOCK = 16


@dataclass(frozen=True)
class BlockSizes:
    """Tokens of a block, powers of 2.

    Args:
        queries, keys: that the forward pass holds, and walks over.
        held, walked: the same of the backward pass, whose programs hold queries, or keys.
    """

    queries: int
    keys: int
    held: int
    walked: int

    @classmethod
    def of(cls, num_queries: int, num_keys: int, head_dim: int, itemsize: int) -> BlockSizes:
        """Choose blocks that an A100's shared memory holds: fewer tokens where heads are wide.

        Args:
            itemsize: of queries, keys and values, in bytes.
        """
        head_bytes = padded_head_dim(head_dim) * itemsize
        wide = 128 if head_bytes <= 256 else (64 if head_bytes <= 512 else 32)
        queries, keys = _block_of(num_queries), _block_of(num_keys)
        backward = min(64 if wide == 128 else 32, queries, keys)
        return cls(min(wide, queries), min(32, keys), backward, backward)

    @property
    def of_queries(self) -> int:
        """Queries are padded to a multiple of this number."""
        return max(self.queries, self.held, self.walked)

    @property
    def of_keys(self) -> int:
        """Keys are padded to a multiple of this number."""
        return max(self.keys, self.held, self.walked)


class Segments(NamedTuple):
    """Segment numbers: queries (B, Q) attend to the keys (B, M) of the same number."""

    queries: Any
    keys: Any


class Operands(NamedTuple):
    """Arrays, how a program of the grid takes them, or what it took.

    Args:
        query, key, value: (B, Q, H, K), (B, M, G, K) twice.
        window: (1,) int32; how many tokens back, itself included, a query looks. Query i stands
            at the place of key i.
        ranges: `_ranges` of the segments, where there are some; each pass makes its own.
    """

    query: Any
    key: Any
    value: Any
    segments: Segments | None
    window: Any
    ranges: Any = None


@dataclass(frozen=True)
class Form:
    """The properties of an attention that are known while it is traced.

    Args:
        num_keys: M without what keys are filled up with.
    """

    scale: float
    cap: float | None
    is_causal: bool
    num_keys: int
    blocks: BlockSizes
    is_interpreted: bool = False


def keys_seen(form: Form, first: Any, count: int, step: int, window: Any) -> tuple[Any, Any]:
    """Return from which block of `step` keys to which `count` queries from `first` on look."""
    end: Any = pl.cdiv(form.num_keys, step)
    if form.is_causal:
        end = jnp.minimum(end, jax.lax.div(first + count + step - 1, step))
    if window is None:
        return 0, end
    return jax.lax.div(jnp.maximum(first + 1 - window, 0), step), end


def queries_seeing(
    form: Form, first: Any, count: int, step: int, end: Any, window: Any
) -> tuple[Any, Any]:
    """Return from which block of `step` queries to which see some of `count` keys from `first` on.

    Args:
        end: number of blocks.
    """
    start = jax.lax.div(first, step) if form.is_causal else 0
    if window is not None:
        end = jnp.minimum(end, jax.lax.div(first + count - 1 + window + step - 1, step))
    return start, end


def with_ranges(operands: Operands, side: int, block: int, step: int) -> Operands:
    """Return operands with the ranges of programs that hold blocks of this side's tokens.

    Args:
        side: 0: queries; 1: keys.
    """
    if operands.segments is None:
        return operands
    held, walked = operands.segments[side], operands.segments[1 - side]
    return operands._replace(ranges=_ranges(held, walked, block, step))


def _ranges(held: jax.Array, walked: jax.Array, block: int, step: int) -> jax.Array:
    """Return (B, held blocks, 2): from which block of the other side to which one may see it.

    Those outside have segments that are all larger, or all smaller.

    Args:
        held, walked: segments, (B, held tokens) and (B, walked tokens).
        block, step: tokens of a block of each.
    """

    def bounds(segments: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
        blocks = segments.reshape(len(segments), -1, size)
        largest = np.iinfo(np.int32).max
        low = jnp.min(jnp.where(blocks == HIDDEN, largest, blocks), axis=2)
        return low, jnp.max(blocks, axis=2)

    (low, high), (other_low, other_high) = bounds(held, block), bounds(walked, step)
    meet = (low[:, :, None] <= other_high[:, None]) & (other_low[:, None] <= high[:, :, None])
    places = jnp.arange(meet.shape[2], dtype=jnp.int32)
    first = jnp.min(jnp.where(meet, places, meet.shape[2]), axis=2)
    end = jnp.max(jnp.where(meet, places + 1, 0), axis=2)
    return jnp.stack([first, end], axis=2)


def in_range(refs: Operands, first: Any, end: Any) -> tuple[Any, Any]:
    """Return the blocks from `first` to `end` that are in a program's range."""
    if refs.ranges is None:
        return first, end
    return jnp.maximum(first, refs.ranges[0]), jnp.minimum(end, refs.ranges[1])


def specs_of_queries(operands: Operands, block: int) -> Operands:
    """Return what a program (block of queries, head, row) takes: those queries, and all keys."""
    head_dim, num_keys = operands.query.shape[3], operands.key.shape[1]
    num_repeats = operands.query.shape[2] // operands.key.shape[2]
    of_keys = by_head(num_keys, head_dim, lambda i, h, b: (b, 0, h // num_repeats, 0))
    shared = shared_specs(
        operands, (block, lambda i, h, b: (b, i)), (num_keys, lambda i, h, b: (b, 0))
    )
    of_queries = by_head(block, head_dim, lambda i, h, b: (b, i, h, 0))
    return Operands(of_queries, of_keys, of_keys, *shared)


def sums_spec(block: int) -> pl.BlockSpec:
    """Return how a program takes a block of (B, H, Q)."""
    return pl.BlockSpec((None, None, block), lambda i, h, b: (b, h, i))


def by_head(num_tokens: int, head_dim: int, index: Callable[..., Any]) -> pl.BlockSpec:
    """Return how a head's tokens are taken of (B, T, H, K)."""
    return pl.BlockSpec((None, num_tokens, None, padded_head_dim(head_dim)), index)


def shared_specs(
    operands: Operands, *sides: tuple[int, Callable[..., Any]]
) -> tuple[Segments | None, Any, Any]:
    """Return how segments, window and ranges are taken; `sides`: tokens, and which, of both."""
    of_segments, of_ranges = None, None
    if operands.segments is not None:
        of_segments = Segments(*(pl.BlockSpec((None, count), index) for count, index in sides))
        of_ranges = pl.BlockSpec((None, None, 2), lambda i, h, b: (b, i, 0))
    of_window = None if operands.window is None else pl.BlockSpec((1,), lambda i, h, b: (0,))
    return of_segments, of_window, of_ranges


def padded_head_dim(head_dim: int) -> int:
    """Return the dims of a head as they are loaded: a power of 2."""
    return max(MIN_BLOCK, pl.next_power_of_2(head_dim))


def _block_of(length: int) -> int:
    """Return the smallest block that holds `length` tokens."""
    return max(MIN_BLOCK, pl.next_power_of_2(length))
