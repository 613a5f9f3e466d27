"""Multi-head latent attention: keys and values of all heads are made of few numbers of a token.

Here they are made before they are attended to, and cached so; values are padded to the keys' width,
so that every kernel and cache takes them.
Dims in this file: B batch, T sequence, D model, H heads, K head dim of queries and keys, V that
of values, Q and R ranks, P rotated dims.
Source: DeepSeek-AI 2024, DeepSeek-V2, section 2.1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp

from redco_flow.models.attention.rope import RotaryConfig
from redco_flow.models.attention.rotary import Rotation, rotate
from redco_flow.models.layer_config import AttentionConfig, LatentConfig
from redco_flow.models.projections import SplitKernel
from redco_flow.models.transformer.blocks import Heads, Norm, normal

Project = Callable[[jax.Array, Sequence[SplitKernel]], list[jax.Array]]


class LatentAttention(nn.Module):
    """Its parameters: from the model's width to few numbers, from those to heads, and back.

    `q_down` (D, Q), `q_up` (Q, H, K), or `q` (D, H, K) where queries have no rank; `kv_down`
    (D, R + P), `kv_up` (R, H, K - P + V), `out` (H, V, D); `q_norm` and `kv_norm` of the numbers.
    """

    config: AttentionConfig
    width: int
    init_stddev: float
    out_stddev: float

    def setup(self) -> None:
        """Declare the parameters."""
        c, init = self.config, normal(self.init_stddev)
        latent = self._latent
        query = (c.num_heads, c.head_dim)
        if latent.query_rank is None:
            self.q = self.param("q", init, (self.width, *query))
        else:
            self.q_down = self.param("q_down", init, (self.width, latent.query_rank))
            self.q_norm = Norm(latent.norm, latent.query_rank)
            self.q_up = self.param("q_up", init, (latent.query_rank, *query))
        num_kept = latent.rank + latent.rotary_dims
        self.kv_down = self.param("kv_down", init, (self.width, num_kept))
        self.kv_norm = Norm(latent.norm, latent.rank)
        of_head = c.head_dim - latent.rotary_dims + latent.value_dim
        self.kv_up = self.param("kv_up", init, (latent.rank, c.num_heads, of_head))
        shape = (c.num_heads, latent.value_dim, self.width)
        self.out = self.param("out", normal(self.out_stddev), shape)

    def heads(
        self,
        x: jax.Array,
        project: Project,
        rotary: RotaryConfig | None,
        rotation: Rotation | None,
    ) -> Heads:
        """Turn tokens (B, T, D) into queries, keys and values, (B, T, H, K) each.

        Args:
            project: multiplies by kernels.
        """
        latent = self._latent
        num_plain = self.config.head_dim - latent.rotary_dims

        def turned(heads: jax.Array) -> jax.Array:
            return heads if rotary is None or rotation is None else rotate(rotary, heads, rotation)

        if latent.query_rank is None:
            (query,) = project(x, [SplitKernel(self.q, 1)])
        else:
            (few,) = project(x, [SplitKernel(self.q_down, 1)])
            (query,) = project(self.q_norm(few), [SplitKernel(self.q_up, 1)])
        plain, rotated = jnp.split(query, [num_plain], axis=-1)
        query = jnp.concatenate([plain, turned(rotated)], axis=-1)

        (few,) = project(x, [SplitKernel(self.kv_down, 1)])
        few, shared = jnp.split(few, [latent.rank], axis=-1)
        (made,) = project(self.kv_norm(few), [SplitKernel(self.kv_up, 1)])
        plain, value = jnp.split(made, [num_plain], axis=-1)
        of_all = jnp.broadcast_to(
            turned(shared[:, :, None]), (*plain.shape[:-1], latent.rotary_dims)
        )
        key = jnp.concatenate([plain, of_all], axis=-1)
        padding = self.config.head_dim - latent.value_dim
        return query, key, jnp.pad(value, ((0, 0), (0, 0), (0, 0), (0, padding)))

    def head_sinks(self) -> None:
        """There are none."""

    def output_bias(self) -> None:
        """There is none."""

    @property
    def _latent(self) -> LatentConfig:
        assert self.config.latent is not None
        return self.config.latent
