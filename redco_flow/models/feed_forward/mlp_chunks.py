"""The feed-forward layer over some of a device's tokens at a time: its units are never all there.

A chunk's units are dropped in the forward pass and computed again in the backward pass. Every
device adds up its own gradients of the kernels over all chunks, in float32, so that they are
reduced once.
Dims in this file: B batch, T sequence, N tokens of a device, C chunks, n tokens of a chunk,
D model, F feed-forward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from redco_flow.engine.random import check_num_elements, keep_factors
from redco_flow.models.feed_forward.token_shards import compute_on_shards
from redco_flow.models.layer_config import MlpConfig
from redco_flow.models.projections import SplitKernel, product
from redco_flow.models.transformer.blocks import Mlp, activate

Arrays = list[jax.Array]


def feed_forward_in_chunks(
    mlp: Mlp, num_chunks: int, x: jax.Array, keys: jax.Array | None, site: int
) -> jax.Array:
    """Return what the layer makes of (B, T, D), without the last bias.

    Args:
        num_chunks: of each device's tokens; more than there are count as many.
        keys, site: of dropout, which is that of all tokens at once.
    """
    c = mlp.config
    kernels = [SplitKernel(mlp.wi.astype(x.dtype), 2), SplitKernel(mlp.wo.astype(x.dtype), 0)]
    if c.has_bias:
        kernels.append(SplitKernel(mlp.wi_bias.astype(x.dtype), 1))
    tokens = [x]
    if keys is None or c.dropout == 0:
        compute = _Chunked(c, num_chunks, None)
    else:
        compute = _Chunked(c, num_chunks, site)
        tokens += _places(x, keys, c.mlp_dim)
        kernels.append(SplitKernel(jnp.arange(c.mlp_dim, dtype=jnp.uint32), 0))
    return compute_on_shards(partial(_units_added_up, compute), tokens, kernels)


def _places(x: jax.Array, keys: jax.Array, mlp_dim: int) -> list[jax.Array]:
    """Return each token's key (B, T, 2), and the place (B, T) of its first unit in its row."""
    num_rows, length = x.shape[:2]
    check_num_elements((length, mlp_dim))
    places = jnp.arange(length, dtype=jnp.uint32) * jnp.uint32(mlp_dim)
    by_token = jnp.broadcast_to(keys[:, None], (num_rows, length, 2))
    return [by_token, jnp.broadcast_to(places, (num_rows, length))]


@dataclass(frozen=True)
class _Chunked:
    """The feed-forward of one device's tokens, a chunk at a time.

    Args:
        site: of dropout; None: there is none.
    """

    config: MlpConfig
    num_chunks: int
    site: int | None

    def of_chunk(self, kernels: Arrays, units: jax.Array | None, tokens: Arrays) -> jax.Array:
        """Return (n, D).

        Args:
            kernels: `wi`, `wo`, and the bias where there is one.
            units: (F,) their numbers, where dropout draws by them.
            tokens: (n, D), and what else dropout draws by.
        """
        (x, *drawn), (wi, wo, *biases) = tokens, kernels
        projected = product(x, wi)
        active = activate(projected + biases[0] if biases else projected, self.config.activation)
        if units is not None:
            active = (active * self._factors(units, *drawn)).astype(active.dtype)
        return product(active, wo)

    def _factors(self, units: jax.Array, keys: jax.Array, places: jax.Array) -> jax.Array:
        """Return what dropout multiplies each unit (n, F) by."""

        def of_token(key: jax.Array, place: jax.Array) -> jax.Array:
            assert self.site is not None
            return keep_factors(place + units, self.config.dropout, key[None], self.site)[0]

        return jax.vmap(of_token)(keys, places)

    def chunks(self, tokens: jax.Array) -> jax.Array:
        """View (N, …) as (C, n, …); zeros fill up the last."""
        size = math.ceil(len(tokens) / min(self.num_chunks, len(tokens)))
        missing = -len(tokens) % size
        filled = jnp.pad(tokens, [(0, missing)] + [(0, 0)] * (tokens.ndim - 1))
        return filled.reshape(-1, size, *tokens.shape[1:])


def _units_added_up(
    compute: _Chunked, tokens: Sequence[jax.Array], kernels: Sequence[jax.Array]
) -> jax.Array:
    """Return (N, D): a sum over the units that this device has."""
    result: jax.Array
    if compute.site is None:
        result = _in_chunks(compute, list(kernels), None, list(tokens))
    else:
        *own, units = kernels
        result = _in_chunks(compute, own, units, list(tokens))
    return result


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _in_chunks(
    compute: _Chunked, kernels: Arrays, units: jax.Array | None, tokens: Arrays
) -> jax.Array:
    x = tokens[0]
    chunks = [compute.chunks(array) for array in tokens]
    made: jax.Array = jax.lax.map(partial(compute.of_chunk, kernels, units), chunks)
    return made.reshape(-1, x.shape[-1])[: len(x)]


_Kept = tuple[Arrays, jax.Array | None, Arrays]


def _forward(
    compute: _Chunked, kernels: Arrays, units: jax.Array | None, tokens: Arrays
) -> tuple[jax.Array, _Kept]:
    return _in_chunks(compute, kernels, units, tokens), (kernels, units, tokens)


def _backward(compute: _Chunked, kept: _Kept, cotangent: jax.Array) -> tuple[Any, None, Any]:
    kernels, units, tokens = kept
    x, *drawn = tokens

    def add_one(total: Arrays, chunk: Arrays) -> tuple[Arrays, jax.Array]:
        cotangent, x, *drawn = chunk
        _, pull_back = jax.vjp(
            lambda kernels, x: compute.of_chunk(kernels, units, [x, *drawn]), kernels, x
        )
        to_kernels, to_x = pull_back(cotangent)
        return [sum_ + added for sum_, added in zip(total, to_kernels, strict=True)], to_x

    start = [jnp.zeros(kernel.shape, jnp.float32) for kernel in kernels]
    chunks = [compute.chunks(array) for array in (cotangent, *tokens)]
    total, to_x = jax.lax.scan(add_one, start, chunks)
    to_kernels = [sums.astype(kernel.dtype) for sums, kernel in zip(total, kernels, strict=True)]
    to_tokens = [to_x.reshape(-1, x.shape[-1])[: len(x)], *[None] * len(drawn)]
    return to_kernels, None, to_tokens


_in_chunks.defvjp(_forward, _backward)
