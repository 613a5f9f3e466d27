"""Transformers with fused kernels as users write them with flax.linen, for `collectives.py`.

Nothing in them knows of devices or of redco-flow: one `nn.Dense(3 * width)` whose result is split
afterwards, in the manner of nanoGPT; the same with grouped queries and one kernel for gate and up.
Dims in this file: B batch, T sequence, D model, H heads, G key-value heads, R query heads to each,
K head dim, V vocabulary.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp


def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Causal attention of (B, T, G, R, K) with (B, T, G, K): R query heads share a key's."""
    scores = jnp.einsum("btgrk,bsgk->bgrts", query, key) / query.shape[-1] ** 0.5
    causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -1e9))
    return jnp.einsum("bgrts,bsgk->btgrk", weights, value)


class PlainBlock(nn.Module):
    """Fused queries, keys and values with a bias; a feed-forward with GELU."""

    num_heads: int
    num_kv_heads: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        width = x.shape[-1]
        head_dim = width // self.num_heads
        fused = nn.Dense(3 * width)(nn.LayerNorm()(x))
        query, key, value = jnp.split(fused, 3, axis=-1)
        heads = (*x.shape[:-1], self.num_heads, head_dim)
        query, key, value = (part.reshape(heads) for part in (query, key, value))
        mixed = attend(query[..., None, :], key, value).reshape(x.shape)
        x = x + nn.Dense(width)(mixed)
        return x + nn.Dense(width)(nn.gelu(nn.Dense(4 * width)(nn.LayerNorm()(x))))


class GatedBlock(nn.Module):
    """Fused queries and fewer keys and values; fused gate and up."""

    num_heads: int
    num_kv_heads: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        width = x.shape[-1]
        head_dim = width // self.num_heads
        kv_width = self.num_kv_heads * head_dim
        fused = nn.Dense(width + 2 * kv_width, use_bias=False)(nn.RMSNorm()(x))
        query, key, value = jnp.split(fused, [width, width + kv_width], axis=-1)
        groups = (*x.shape[:-1], self.num_kv_heads)
        query = query.reshape(*groups, self.num_heads // self.num_kv_heads, head_dim)
        mixed = attend(query, key.reshape(*groups, head_dim), value.reshape(*groups, head_dim))
        x = x + nn.Dense(width, use_bias=False)(mixed.reshape(x.shape))
        gate_up = nn.Dense(8 * width, use_bias=False)(nn.RMSNorm()(x))
        gate, up = jnp.split(gate_up, 2, axis=-1)
        return x + nn.Dense(width, use_bias=False)(nn.silu(gate) * up)


class FusedModel(nn.Module):
    """Token ids (B, T) to logits (B, T, V).

    Args:
        block: PlainBlock or GatedBlock.
        is_scanned: layers under `nn.scan` and `nn.remat`, or a Python loop over them.
        is_tied: the head is the embedding.
    """

    vocab_size: int
    width: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    block: Any = PlainBlock
    is_scanned: bool = False
    is_tied: bool = True

    @nn.compact
    def __call__(self, ids: jax.Array) -> jax.Array:
        embed = nn.Embed(self.vocab_size, self.width)
        positions = self.param("positions", nn.initializers.normal(0.02), (1024, self.width))
        x = embed(ids) + positions[: ids.shape[1]]
        if self.is_scanned:
            x = self._scan(x)
        else:
            for _ in range(self.num_layers):
                x = self.block(self.num_heads, self.num_kv_heads)(x)
        x = nn.LayerNorm()(x)
        return embed.attend(x) if self.is_tied else nn.Dense(self.vocab_size, use_bias=False)(x)

    def _scan(self, x: jax.Array) -> jax.Array:
        layers = nn.scan(
            lambda block, x, _: (block(x), None),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=self.num_layers,
        )
        x, _ = layers(nn.remat(self.block)(self.num_heads, self.num_kv_heads), x, None)
        return x
