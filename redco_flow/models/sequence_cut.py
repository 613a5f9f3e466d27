"""How a sequence is cut: into one part per context shard, and each part into chunks.

Chunks are what attention works on at a time. A shard's chunks are neighbours; or, where the cut is
balanced, half of them come from the front of the sequence and as many from its end, so that under a
causal mask every shard has the same to do.
Dims in this file: B batch, T tokens of one shard, N its chunks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

# More of them at once costs memory, fewer cost speed.
CHUNK_LENGTH = 1024


@dataclass(frozen=True)
class SequenceCut:
    """A cut; make it with `cut_sequence`."""

    num_shards: int
    num_chunks: int
    chunk_length: int
    is_balanced: bool

    @property
    def shard_length(self) -> int:
        """T."""
        return self.num_chunks * self.chunk_length

    @property
    def length(self) -> int:
        """Tokens of the whole, with what fills it up."""
        return self.num_shards * self.shard_length

    def first(self, shard: jax.Array, chunk: jax.Array) -> jax.Array:
        """Return the place in the sequence at which a shard's chunk begins."""
        if not self.is_balanced:
            return (shard * self.num_chunks + chunk) * self.chunk_length
        half = self.num_chunks // 2
        front = shard * half + chunk
        end = (2 * self.num_shards - 1 - shard) * half + chunk - half
        return jnp.where(chunk < half, front, end) * self.chunk_length

    def chunks(self, x: jax.Array) -> jax.Array:
        """View (B, T, …) as (N, B, T / N, …)."""
        batch, _, *rest = x.shape
        parted = x.reshape(batch, self.num_chunks, self.chunk_length, *rest)
        return jnp.moveaxis(parted, 1, 0)

    def joined(self, chunks: jax.Array) -> jax.Array:
        """View (N, B, T / N, …) as (B, T, …)."""
        _, batch, _, *rest = chunks.shape
        return jnp.moveaxis(chunks, 0, 1).reshape(batch, self.shard_length, *rest)


def cut_sequence(length: int, num_shards: int, *, is_balanced: bool = False) -> SequenceCut:
    """Cut a sequence into equal chunks of at most CHUNK_LENGTH tokens, filled up least."""
    parts = 2 if is_balanced else 1
    share = math.ceil(length / (parts * num_shards))
    num_chunks = math.ceil(share / CHUNK_LENGTH)
    chunk_length = math.ceil(share / num_chunks)
    return SequenceCut(num_shards, parts * num_chunks, chunk_length, is_balanced)


def can_balance(length: int, num_shards: int) -> bool:
    """Say whether a balanced cut needs no filling, which would stand amid the sequence."""
    return cut_sequence(length, num_shards, is_balanced=True).length == length
