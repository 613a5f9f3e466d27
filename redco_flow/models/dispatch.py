"""Bring tokens to their experts, sorted by expert, and what experts make of them back.

Each token stands once for each of its experts; nothing is dropped, and both ways are gathers, as
are their gradients.
Dims in this file: T tokens, K experts per token, E experts, R = T K rows.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Dispatch(NamedTuple):
    """Which row goes where.

    Attributes:
        order: (R,) the row, of those in the tokens' order, that comes at each place.
        places: (R,) where each row in the tokens' order comes.
        ends: int32 (E,) where each expert's rows end.
    """

    order: jax.Array
    places: jax.Array
    ends: jax.Array

    def sorted_by_expert(self, rows: jax.Array) -> jax.Array:
        """Sort rows (R, …) in the tokens' order."""
        return _taken(rows, self.order, self.places)

    def sorted_by_token(self, rows: jax.Array) -> jax.Array:
        """Undo `sorted_by_expert`."""
        return _taken(rows, self.places, self.order)


def plan_dispatch(experts: jax.Array, num_experts: int) -> Dispatch:
    """Sort the experts (R,) of all rows in the tokens' order; equal ones keep it."""
    order = jnp.argsort(experts, stable=True)
    upto = experts[None, :] <= jnp.arange(num_experts)[:, None]
    return Dispatch(order, jnp.argsort(order), jnp.sum(upto, axis=1, dtype=jnp.int32))


@jax.custom_vjp
def _taken(rows: jax.Array, places: jax.Array, inverse: jax.Array) -> jax.Array:
    """Return the rows at these places, which are all of them, each once."""
    return rows[places]


def _forward(
    rows: jax.Array, places: jax.Array, inverse: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return rows[places], (places, inverse)


def _backward(
    kept: tuple[jax.Array, jax.Array], cotangent: jax.Array
) -> tuple[jax.Array, None, None]:
    # As it comes, a gather's gradient is a scatter that adds.
    places, inverse = kept
    return _taken(cotangent, inverse, places), None, None


_taken.defvjp(_forward, _backward)
