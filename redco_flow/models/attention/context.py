"""The mesh axis `context`, over which sequences are split: how many shards, and what lies there.

The number of shards is that of the mesh that is being traced for; without one nothing is split.
Dims in this file: B batch, T sequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from redco_flow.engine.sharding.mesh import is_mapped

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
    return frozenset(filter(is_mapped, jax.sharding.get_abstract_mesh().axis_names))


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


_SEQUENCE = PartitionSpec(None, CONTEXT_AXIS)


@partial(jax.tree_util.register_dataclass, data_fields=[], meta_fields=["is_balanced"])
@dataclass(frozen=True)
class SequenceOrder:
    """An order of tokens: balanced, or the text's own."""

    is_balanced: bool = False

    def arranged(self, x: jax.Array) -> jax.Array:
        """Bring (B, T, …), whole on every shard, into this order."""
        return x[:, _places(x.shape[1])] if self.is_balanced else x

    def restored(self, x: jax.Array) -> jax.Array:
        """Bring (B, T, …), split over the shards, back into the text's order.

        Each shard sends at most what it holds, once forward and once backward.
        """
        if not self.is_balanced:
            return x
        restored: jax.Array = _restored(x)
        return restored


def balanced_where_possible(length: int) -> SequenceOrder:
    """Return the balanced order where there are several shards and their parts are equal."""
    num_shards = num_context_shards()
    return SequenceOrder(num_shards > 1 and can_balance(length, num_shards))


def _places(length: int) -> np.ndarray:
    """Return the index in the text of the token at each place, (T,)."""
    parts = np.arange(length).reshape(2 * num_context_shards(), -1)
    order = [part for shard in _held_parts() for part in shard]
    return parts[order].reshape(-1)


def _held_parts() -> list[tuple[int, int]]:
    """Return the two parts that each shard holds, of twice as many as there are shards."""
    num_shards = num_context_shards()
    return [(shard, 2 * num_shards - 1 - shard) for shard in range(num_shards)]


@jax.custom_vjp
def _restored(x: jax.Array) -> jax.Array:
    return _on_shards(_restore, x)


def _restored_forward(x: jax.Array) -> tuple[jax.Array, None]:
    return _restored(x), None


def _restored_backward(_: None, cotangent: jax.Array) -> tuple[jax.Array]:
    return (_on_shards(_arrange, cotangent),)


_restored.defvjp(_restored_forward, _restored_backward)


def _on_shards(exchange: Callable[[jax.Array, jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    specs = PartitionSpec(CONTEXT_AXIS), _SEQUENCE
    on_shards = on_context_shards(exchange, in_specs=specs, out_specs=_SEQUENCE)
    exchanged: jax.Array = on_shards(jnp.arange(num_context_shards()), x)
    return exchanged


def _restore(numbers: jax.Array, x: jax.Array) -> jax.Array:
    """From the parts that a shard holds to the two that are neighbours in the text."""
    is_even = numbers[0] % 2 == 0
    front, end = jnp.split(x, 2, axis=1)
    even = _sent(jnp.where(is_even, front, end), 0)
    odd = _sent(jnp.where(is_even, end, front), 1)
    return jnp.concatenate([even, odd], axis=1)


def _arrange(numbers: jax.Array, x: jax.Array) -> jax.Array:
    """The way back."""
    is_even = numbers[0] % 2 == 0
    even, odd = (_sent(part, n, back=True) for n, part in enumerate(jnp.split(x, 2, axis=1)))
    parts = jnp.where(is_even, even, odd), jnp.where(is_even, odd, even)
    return jnp.concatenate(parts, axis=1)


def _sent(part: jax.Array, first: int, *, back: bool = False) -> jax.Array:
    """Send parts of even numbers (`first` 0) or odd ones (1); every shard has one of each."""
    holder = {part: shard for shard, parts in enumerate(_held_parts()) for part in parts}
    route = [(holder[number], number // 2) for number in range(first, len(holder), 2)]
    route = [(to, source) for source, to in route] if back else route
    sent: jax.Array = jax.lax.ppermute(part, CONTEXT_AXIS, route)
    return sent
