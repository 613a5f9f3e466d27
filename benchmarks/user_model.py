"""A transformer as a user would write it with flax.linen, for `collectives.py`.

Nothing in it knows of devices or of redco-flow: `nn.Embed`, `nn.DenseGeneral`, an unrolled stack of
pre-norm layers with one fused projection for queries, keys and values and one for gate and up, or
with Flax's own attention and a kernel each.
Dims in this file: B batch, T sequence, D model, H heads, K head dim, F feed-forward, V vocabulary.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp


class Block(nn.Module):
    """Self-attention, then a gated feed-forward."""

    num_heads: int
    hidden: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        width = x.shape[-1]
        head_dim = width // self.num_heads
        normed = nn.LayerNorm()(x)
        projected = nn.DenseGeneral((3, self.num_heads, head_dim))(normed)
        query, key, value = jnp.unstack(projected, axis=-3)
        scores = jnp.einsum("bthk,bshk->bhts", query, key) / head_dim**0.5
        causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        weights = jax.nn.softmax(jnp.where(causal, scores, -1e9))
        mixed = jnp.einsum("bhts,bshk->bthk", weights, value)
        x = x + nn.DenseGeneral(width, axis=(-2, -1))(mixed)
        gate, up = jnp.unstack(nn.DenseGeneral((2, self.hidden))(nn.LayerNorm()(x)), axis=-2)
        return x + nn.Dense(width)(nn.silu(gate) * up)


class SeparateBlock(nn.Module):
    """Flax's own attention, then SwiGLU or GELU: several kernels read one array.

    Args:
        dtype: of products; where it is not float32, each kernel casts what it reads.
    """

    num_heads: int
    hidden: int
    is_gated: bool = True
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        width = x.shape[-1]
        causal = nn.make_causal_mask(x[..., 0])
        attention = nn.MultiHeadDotProductAttention(self.num_heads, dtype=self.dtype)
        x = x + attention(nn.LayerNorm()(x), mask=causal)
        normed = nn.LayerNorm()(x)
        dense = partial(nn.Dense, dtype=self.dtype)
        hidden = dense(self.hidden)(normed)
        if self.is_gated:
            return x + dense(width)(nn.silu(hidden) * dense(self.hidden)(normed))
        return x + dense(width)(nn.gelu(hidden))


class UserModel(nn.Module):
    """Token ids (B, T) to logits (B, T, V).

    Args:
        block: of a layer, given the number of heads and of hidden units.
    """

    vocab_size: int
    width: int
    num_layers: int
    num_heads: int
    block: Callable[..., nn.Module] = Block

    @nn.compact
    def __call__(self, ids: jax.Array) -> jax.Array:
        embed = nn.Embed(self.vocab_size, self.width)
        positions = self.param("positions", nn.initializers.normal(0.02), (1024, self.width))
        x = embed(ids) + positions[: ids.shape[1]]
        for _ in range(self.num_layers):
            x = self.block(self.num_heads, 4 * self.width)(x)
        return embed.attend(nn.LayerNorm()(x))
