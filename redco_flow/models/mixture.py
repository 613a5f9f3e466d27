"""A mixture of experts: a router sends each token to a few gated feed-forward layers.

No token is dropped and none waits for another: every expert computes every token, and those
that were not chosen weigh zero. That is exact, splits over devices like one wide layer (one
reduction), and costs E / k times the products of a sparse dispatch. Refuses to know layers.
Dims in this file: L layers, B batch, T sequence, D model, E experts, F feed-forward.
Source: Jiang et al. 2024, Mixtral; load balancing as Fedus et al. 2021, equations 4 to 6.
"""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from redco_flow.models.activation import activate
from redco_flow.models.block_config import MixtureConfig
from redco_flow.models.blocks import normal
from redco_flow.models.product import wide_product


class MixtureOfExperts(nn.Module):
    """The router (D, E) and the experts' kernels: `wi` (E, D, 2, F), `wo` (E, F, D)."""

    config: MixtureConfig
    width: int
    init_deviation: float
    out_deviation: float

    def setup(self) -> None:
        """Declare the parameters."""
        c, init = self.config, normal(self.init_deviation)
        self.router = self.param("router", init, (self.width, c.num_experts))
        self.wi = self.param("wi", init, (c.num_experts, self.width, 2, c.num_units))
        shape = (c.num_experts, c.num_units, self.width)
        self.wo = self.param("wo", normal(self.out_deviation), shape)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return what the chosen experts make of (B, T, D), and the router's logits (B, T, E)."""
        c = self.config
        router_logits = wide_product(x, self.router.astype(x.dtype))
        weights = routing_weights(router_logits, c.experts_per_token)
        projected = jnp.einsum("btd,edgf->btegf", x, self.wi.astype(x.dtype))
        inner = activate(projected, c.activation) * weights.astype(x.dtype)[..., None]
        outer = jnp.einsum("btef,efd->btd", inner, self.wo.astype(x.dtype))
        return outer, router_logits


def routing_weights(router_logits: jax.Array, experts_per_token: int) -> jax.Array:
    """Return each expert's share (…, E), float32: the chosen ones' probabilities, summing to 1."""
    probabilities = jax.nn.softmax(router_logits, axis=-1)
    kept = probabilities * _chosen(probabilities, experts_per_token)
    return kept / jnp.sum(kept, axis=-1, keepdims=True)


def _chosen(probabilities: jax.Array, experts_per_token: int) -> jax.Array:
    """Return 1 for the likeliest experts of each token and 0 for the others."""
    _, places = jax.lax.top_k(probabilities, experts_per_token)
    return jnp.sum(jax.nn.one_hot(places, probabilities.shape[-1]), axis=-2)


def load_balancing_loss(
    router_logits: jax.Array, experts_per_token: int, attention_mask: jax.Array | None = None
) -> jax.Array:
    """Return a number that is least, `experts_per_token`, when all experts are used alike.

    Args:
        router_logits: (L, B, T, E), the second result of `apply_with_router`.
        attention_mask: (B, T); padding does not count.
    """
    probabilities = jax.nn.softmax(router_logits.astype(jnp.float32), axis=-1)
    num_layers, *shape, num_experts = probabilities.shape
    counted = jnp.ones(shape) if attention_mask is None else (attention_mask != 0)
    counted = jnp.broadcast_to(counted.astype(jnp.float32), (num_layers, *shape))
    total = jnp.sum(counted)
    chosen = _chosen(probabilities, experts_per_token)
    share_of_tokens = jnp.einsum("lbt,lbte->e", counted, chosen) / total
    share_of_routing = jnp.einsum("lbt,lbte->e", counted, probabilities) / total
    return num_experts * jnp.sum(share_of_tokens * share_of_routing)
