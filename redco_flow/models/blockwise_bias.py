"""What is added to attention's scores, told so that any block of it can be made where it is used.

Whole, it would be as large as the scores, which are never whole where sequences are split. Pure
functions of arrays.
Dims in this file: B batch, Q queries, M keys, H heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp

from redco_flow.models.attention import attention_mask_bias
from redco_flow.models.relative_position import spread_diagonals


class Block(NamedTuple):
    """A rectangle of the scores: its first query and key, and how many of each."""

    first_query: jax.Array
    num_queries: int
    first_key: jax.Array
    num_keys: int

    @property
    def queries(self) -> jax.Array:
        """Return the queries' numbers, (Q,)."""
        return self.first_query + jnp.arange(self.num_queries)

    @property
    def keys(self) -> jax.Array:
        """Return the keys' numbers, (M,)."""
        return self.first_key + jnp.arange(self.num_keys)


class VisibleKeys(NamedTuple):
    """Hides padding from every query.

    Attributes:
        is_visible: (B, M); 0 is hidden.
    """

    is_visible: jax.Array

    def padded(self, num_queries: int, num_keys: int) -> VisibleKeys:
        """Return it for longer sequences."""
        del num_queries
        return VisibleKeys(_padded(self.is_visible, num_keys))

    def block(self, block: Block) -> jax.Array:
        """Return (B, 1, 1, M) of a block."""
        visible = _part(self.is_visible, block.first_key, block.num_keys)
        return attention_mask_bias(visible)[:, None, None, :]


class SameDocument(NamedTuple):
    """Hides other documents of a packed row.

    Attributes:
        queries: (B, Q), which document each query belongs to.
        keys: (B, M).
    """

    queries: jax.Array
    keys: jax.Array

    def padded(self, num_queries: int, num_keys: int) -> SameDocument:
        """Return it for longer sequences."""
        return SameDocument(_padded(self.queries, num_queries), _padded(self.keys, num_keys))

    def block(self, block: Block) -> jax.Array:
        """Return (B, 1, Q, M) of a block."""
        queries = _part(self.queries, block.first_query, block.num_queries)
        keys = _part(self.keys, block.first_key, block.num_keys)
        return attention_mask_bias(queries[:, :, None] == keys[:, None, :])[:, None]


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["values"],
    meta_fields=["num_queries"],
)
@dataclass(frozen=True)
class ByDistance:
    """A learned bias of each head and distance.

    Attributes:
        values: (H, Q + M - 1), of distances (key minus query) from 1 - Q to M - 1.
        num_queries: Q.
    """

    values: jax.Array
    num_queries: int

    def padded(self, num_queries: int, num_keys: int) -> ByDistance:
        """Return it for longer sequences."""
        before = num_queries - self.num_queries
        after = num_queries + num_keys - 1 - before - self.values.shape[1]
        values = jnp.pad(self.values, ((0, 0), (before, after)))
        return ByDistance(values, num_queries)

    def block(self, block: Block) -> jax.Array:
        """Return (1, H, Q, M) of a block."""
        first = block.first_key - block.first_query - block.num_queries + self.num_queries
        length = block.num_queries + block.num_keys - 1
        part = jax.lax.dynamic_slice_in_dim(self.values, first, length, axis=1)
        return spread_diagonals(part, block.num_queries, block.num_keys)[None]


Hiding = VisibleKeys | SameDocument
# Whole, broadcasting to the scores, or told by blocks.
Bias = jax.Array | Hiding | ByDistance
Biases = tuple[Bias, ...]


def as_arrays(biases: Biases) -> tuple[jax.Array, ...]:
    """Return the biases of sequences that are not split: all of them are whole."""
    return cast("tuple[jax.Array, ...]", biases)


def _padded(numbers: jax.Array, length: int) -> jax.Array:
    return jnp.pad(numbers, ((0, 0), (0, length - numbers.shape[1])))


def _part(numbers: jax.Array, first: jax.Array, length: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(numbers, first, length, axis=1)
