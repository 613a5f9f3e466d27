"""The order in which a causal model's tokens lie on the context shards, so that all work alike.

Under a causal mask the last tokens see the most. Where tokens lie in balanced order each shard has
one part from the front of the sequence and one from its end, and only what goes into the layers and
comes out of them is reordered: positions, masks, labels and logits stay as they are.
Dims in this file: B batch, T sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from redco_flow.models.attention.context import (
    CONTEXT_AXIS,
    can_balance,
    num_context_shards,
    on_context_shards,
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
