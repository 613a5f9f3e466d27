"""The mesh axis `context`, over which sequences are split: how many shards, and what lies there.

The number of shards is that of the mesh that is being traced for; without one nothing is split.
Dims in this file: B batch, T sequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

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


def cut_sequence(
    length: int,
    num_shards: int,
    *,
    is_balanced: bool = False,
    max_length: int | None = CHUNK_LENGTH,
) -> SequenceCut:
    """Cut a sequence into equal chunks of at most `max_length` tokens, filled up least."""
    parts = 2 if is_balanced else 1
    share = math.ceil(length / (parts * num_shards))
    num_chunks = 1 if max_length is None else math.ceil(share / max_length)
    chunk_length = math.ceil(share / num_chunks)
    return SequenceCut(num_shards, parts * num_chunks, chunk_length, is_balanced)


def can_balance(length: int, num_shards: int) -> bool:
    """Say whether a balanced cut needs no filling, which would be amid the sequence."""
    return cut_sequence(length, num_shards, is_balanced=True).length == length


def mapped_axes() -> frozenset[str]:
    """Return those of the mesh that is being traced for; none without a mesh."""
    return frozenset(filter(_is_mapped, jax.sharding.get_abstract_mesh().axis_names))


def _is_mapped(axis: str) -> bool:
    try:
        jax.lax.axis_size(axis)
    except NameError:
        return False
    return True


CONTEXT_AXIS = "context"


def num_context_shards() -> int:
    """Return the size of the mesh axis `context` that is being traced for, 1 without a mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty else dict(mesh.shape).get(CONTEXT_AXIS, 1)


def split_sequence(x: jax.Array) -> jax.Array:
    """Lay (B, T, …) out with T over the context shards; the other dims stay as they are."""
    if num_context_shards() == 1:
        return x
    free = PartitionSpec.UNCONSTRAINED
    spec = PartitionSpec(free, CONTEXT_AXIS, *[free] * (x.ndim - 2))
    placed: jax.Array = jax.lax.with_sharding_constraint(x, spec)
    return placed


def on_context_shards(
    function: Callable[..., Any], *, in_specs: Any, out_specs: Any, takes_all_axes: bool = False
) -> Any:
    """Return `function` as each context shard runs it; the other mesh axes stay the compiler's.

    Where it is mapped over one of these by name, as by `jax.vmap`, each of that axis' shards runs
    it on its own part.

    Args:
        in_specs, out_specs: PartitionSpecs, in trees like arguments and results.
        takes_all_axes: whether none is the compiler's, as Mosaic's kernels need it.
    """
    every = jax.sharding.get_abstract_mesh().axis_names if takes_all_axes else ()
    return jax.shard_map(
        function,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names={CONTEXT_AXIS, *mapped_axes(), *every},
        check_vma=False,
    )
