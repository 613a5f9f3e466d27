"""Parts that lie side by side along one dim, as queries, keys and values in a fused kernel.

Tiles of such a dim are no shards of its parts. Stored, its columns are therefore sorted by shard:
first what the first shard has of every part, then the second's. Shapes stay; norms, and whatever
an optimizer does by element, row or column, do not depend on the order. Pure: knows arrays alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class FusedParts:
    """A dim that is stored shard by shard.

    Args:
        position: of the dim.
        parts: their sizes, in order; the shards divide each. One alone is stored as it is.
    """

    position: int
    parts: tuple[int, ...]
    num_shards: int

    @property
    def size(self) -> int:
        """Of the dim."""
        return sum(self.parts)

    @property
    def is_even(self) -> bool:
        """Whether all parts have one size."""
        return len(set(self.parts)) == 1

    def at(self, position: int) -> FusedParts:
        """Return the same of another dim."""
        return replace(self, position=position)

    def to_storage(self, exact: jax.Array) -> jax.Array:
        """Sort an array's columns by shard; traceable."""
        stops = list(accumulate(self.parts))[:-1]
        pieces = [
            part.reshape(self._shape(part.shape, self.num_shards, size // self.num_shards))
            for size, part in zip(
                self.parts, jnp.split(exact, stops, axis=self.position), strict=True
            )
        ]
        return jnp.concatenate(pieces, axis=self.position + 1).reshape(exact.shape)

    def to_logical(self, stored: jax.Array) -> jax.Array:
        """Undo `to_storage`."""
        pieces = [self.take(stored, number, number + 1) for number in range(len(self.parts))]
        return jnp.concatenate(pieces, axis=self.position)

    def take(self, stored: jax.Array, first: int, stop: int) -> jax.Array:
        """Return the parts [first, stop) of a stored array, sorted by shard as all of them are."""
        columns = (self.num_shards, self.size // self.num_shards)
        by_shard = stored.reshape(self._shape(stored.shape, *columns))
        starts = [0, *accumulate(part // self.num_shards for part in self.parts)]
        taken = jax.lax.slice_in_dim(by_shard, starts[first], starts[stop], axis=self.position + 1)
        return taken.reshape(self._shape(stored.shape, sum(self.parts[first:stop])))

    def stack(self, stored: jax.Array) -> jax.Array:
        """Return a stored array whose even parts have a dim of their own before the columns'."""
        sizes = (self.num_shards, len(self.parts), self.parts[0] // self.num_shards)
        by_shard = stored.reshape(self._shape(stored.shape, *sizes))
        by_part = jnp.swapaxes(by_shard, self.position, self.position + 1)
        return by_part.reshape(self._shape(stored.shape, len(self.parts), self.parts[0]))

    def _shape(self, shape: Sequence[int], *sizes: int) -> tuple[int, ...]:
        return (*shape[: self.position], *sizes, *shape[self.position + 1 :])
