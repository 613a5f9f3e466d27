"""A mixture of experts: a router sends each token to a few gated feed-forward layers.

Only the chosen experts compute a token; none is dropped and none waits for another, whatever the
others' choice. Tokens are sorted by expert and multiplied group by group; a few tokens, as in
decoding, are multiplied by every expert, since reading the kernels is then what takes time, and
weigh zero where they were not sent.
Dims in this file: L layers, B batch, T sequence, N tokens, D model, E experts, K experts per
token, F feed-forward.
Source: Jiang et al. 2024, Mixtral.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from redco_flow.models.activation import activate
from redco_flow.models.block_config import MixtureConfig
from redco_flow.models.blocks import normal
from redco_flow.models.dispatch import plan_dispatch
from redco_flow.models.expert_shards import compute_on_shards
from redco_flow.models.grouped_product import grouped_product
from redco_flow.models.product import KEPT_PRODUCT, wide_product

# Up to so many tokens a product with every expert takes no longer than reading the kernels.
_FEW_TOKENS = 32


class MixtureOfExperts(nn.Module):
    """The router (D, E) and the experts' kernels: `wi` (E, D, 2, F), `wo` (E, F, D)."""

    config: MixtureConfig
    width: int
    init_stddev: float
    out_stddev: float

    def setup(self) -> None:
        """Declare the parameters."""
        c, init = self.config, normal(self.init_stddev)
        self.router = self.param("router", init, (self.width, c.num_experts))
        self.wi = self.param("wi", init, (c.num_experts, self.width, 2, c.mlp_dim))
        shape = (c.num_experts, c.mlp_dim, self.width)
        self.wo = self.param("wo", normal(self.out_stddev), shape)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return what the chosen experts make of (B, T, D), and the router's logits (B, T, E)."""
        router_logits = wide_product(x, self.router.astype(x.dtype))
        wi, wo = self.wi.astype(x.dtype), self.wo.astype(x.dtype)
        compute = partial(mix_experts, self.config)
        return compute_on_shards(compute, x, router_logits, wi, wo), router_logits


class Choice(NamedTuple):
    """Where tokens are sent.

    Attributes:
        experts: (…, K) int32, the likeliest first.
        weights: (…, K) float32, their probabilities scaled to a sum of 1.
    """

    experts: jax.Array
    weights: jax.Array


def choose_experts(router_logits: jax.Array, experts_per_token: int) -> Choice:
    """Choose by router logits (…, E)."""
    probabilities = jax.nn.softmax(router_logits.astype(jnp.float32), axis=-1)
    _, experts = jax.lax.top_k(probabilities, experts_per_token)
    is_chosen = jax.nn.one_hot(experts, probabilities.shape[-1])
    kept = jnp.sum(is_chosen * probabilities[..., None, :], axis=-1)
    return Choice(experts, kept / jnp.sum(kept, axis=-1, keepdims=True))


def mix_experts(
    config: MixtureConfig, x: jax.Array, router_logits: jax.Array, wi: jax.Array, wo: jax.Array
) -> jax.Array:
    """Return what the chosen experts make of tokens (N, D) with router logits (N, E): (N, D)."""
    choice = choose_experts(router_logits, config.experts_per_token)
    mix = _mix_every if len(x) <= _FEW_TOKENS else _mix_chosen
    return mix(config, x, choice, wi, wo)


def _mix_chosen(
    config: MixtureConfig, x: jax.Array, choice: Choice, wi: jax.Array, wo: jax.Array
) -> jax.Array:
    """Multiply each token by its own experts' kernels."""
    dispatch = plan_dispatch(choice.experts.reshape(-1), config.num_experts)
    rows = dispatch.sorted_by_expert(jnp.repeat(x, config.experts_per_token, axis=0))
    weights = dispatch.sorted_by_expert(choice.weights.astype(x.dtype).reshape(-1, 1))
    projected = checkpoint_name(grouped_product(rows, wi, dispatch.ends), KEPT_PRODUCT)
    inner = activate(projected, config.activation) * weights
    outer = dispatch.sorted_by_token(grouped_product(inner, wo, dispatch.ends))
    return jnp.sum(outer.reshape(len(x), config.experts_per_token, -1), axis=1)


def _mix_every(
    config: MixtureConfig, x: jax.Array, choice: Choice, wi: jax.Array, wo: jax.Array
) -> jax.Array:
    """Multiply each token by every expert's kernels; those not chosen weigh zero."""
    shares = jax.nn.one_hot(choice.experts, config.num_experts) * choice.weights[..., None]
    weights = jnp.sum(shares, axis=-2).T.astype(x.dtype)
    everywhere = jnp.broadcast_to(x, (config.num_experts, *x.shape))
    projected = jnp.einsum("end,edgf->engf", everywhere, wi)
    inner = activate(projected, config.activation) * weights[..., None]
    return jnp.sum(jnp.einsum("enf,efd->end", inner, wo), axis=0)
