"""A mixture of experts: a router sends each token to a few gated feed-forward layers.

Only the chosen experts compute a token; none is dropped and none waits for another, whatever the
others' choice. Tokens are sorted by expert and multiplied group by group; a few tokens, as in
decoding, are multiplied by every expert, since reading the kernels is then what takes time, and
weigh zero where they were not sent.
Dims in this file: L layers, B batch, T sequence, N tokens, D model, E experts, K experts per
token, F feed-forward.
Sources: Jiang et al. 2024, Mixtral; grouped routing: DeepSeek-AI 2024, DeepSeek-V3, section 2.1.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from redco_flow.models.feed_forward.grouped_product import grouped_product
from redco_flow.models.feed_forward.token_shards import compute_on_shards
from redco_flow.models.layer_config import GroupedRouting, MixtureConfig
from redco_flow.models.projections import SplitKernel, product, wide_product
from redco_flow.models.transformer.blocks import activate, clamped_gate, normal, zeros


class Dispatch(NamedTuple):
    """The order that sorts rows by expert.

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

# Up to this number of tokens a product with every expert takes no longer than reading the kernels.
_FEW_TOKENS = 32


class MixtureOfExperts(nn.Module):
    """The router (D, E) and the experts' kernels: `wi` (E, D, 2, F), `wo` (E, F, D); biases.

    Biases are beside their kernels: (E), (E, 2, F) and (E, D). `choice_bias` (E) where the routing
    is grouped.
    """

    config: MixtureConfig
    width: int
    init_stddev: float
    out_stddev: float

    def setup(self) -> None:
        """Declare the parameters."""
        c, init = self.config, normal(self.init_stddev)
        self.router = self.param("router", init, (self.width, c.num_experts))
        if c.routing is not None:
            self.choice_bias = self.param("choice_bias", zeros, (c.num_experts,))
        self.wi = self.param("wi", init, (c.num_experts, self.width, 2, c.mlp_dim))
        shape = (c.num_experts, c.mlp_dim, self.width)
        self.wo = self.param("wo", normal(self.out_stddev), shape)
        if c.has_bias:
            self.router_bias = self.param("router_bias", init, (c.num_experts,))
            self.wi_bias = self.param("wi_bias", zeros, (c.num_experts, 2, c.mlp_dim))
            self.wo_bias = self.param("wo_bias", zeros, (c.num_experts, self.width))

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return what the chosen experts make of (B, T, D), and the router's logits (B, T, E)."""
        router_logits = checkpoint_name(wide_product(x, self.router.astype(x.dtype)), "mlp_in")
        if self.config.has_bias:
            router_logits = router_logits + self.router_bias
        wi, wo = self.wi.astype(x.dtype), self.wo.astype(x.dtype)

        def compute(tokens: Sequence[jax.Array], kernels: Sequence[jax.Array]) -> jax.Array:
            x, router_logits, *preferences = tokens
            preferred = next(iter(preferences), None)
            return mix_experts(self.config, x, router_logits, *kernels, preferences=preferred)

        tokens, kernels = [x, router_logits], [SplitKernel(wi, 3), SplitKernel(wo, 1)]
        if self.config.routing is not None:
            tokens.append(nn.sigmoid(router_logits) + self.choice_bias)
        if not self.config.has_bias:
            return compute_on_shards(compute, tokens, kernels), router_logits
        kernels.append(SplitKernel(self.wi_bias.astype(x.dtype), 2))
        outer = compute_on_shards(compute, tokens, kernels)
        # Every model shard has it in full, so it is added once and not to each shard's part.
        shares = expert_shares(self.config, router_logits).astype(x.dtype)
        return outer + product(shares, self.wo_bias.astype(x.dtype)), router_logits


class ExpertChoice(NamedTuple):
    """The experts that the router chose for each token.

    Attributes:
        experts: (…, K) int32, the likeliest first.
        weights: (…, K) float32, their probabilities, or sigmoids where the routing is grouped,
            scaled to a sum of 1 where the config says so.
    """

    experts: jax.Array
    weights: jax.Array


def choose_experts(
    config: MixtureConfig, router_logits: jax.Array, preferences: jax.Array | None = None
) -> ExpertChoice:
    """Choose by router logits (…, E), or where the routing is grouped by preferences (…, E)."""
    wide, routing = router_logits.astype(jnp.float32), config.routing
    if routing is None:
        scores = preferred = jax.nn.softmax(wide, axis=-1)
    else:
        assert preferences is not None
        scores, preferred = nn.sigmoid(wide), _in_best_groups(routing, preferences)
    _, experts = jax.lax.top_k(preferred, config.experts_per_token)
    is_chosen = jax.nn.one_hot(experts, config.num_experts)
    kept = jnp.sum(is_chosen * scores[..., None, :], axis=-1)
    if config.is_normalised:
        total = jnp.sum(kept, axis=-1, keepdims=True)
        # Sigmoids may all be zero, other than probabilities.
        kept = kept / (total if routing is None else total + 1e-20)
    return ExpertChoice(experts, kept if routing is None else kept * routing.scale)


def _in_best_groups(routing: GroupedRouting, preferences: jax.Array) -> jax.Array:
    """Return preferences (…, E), minus infinity in all but a token's best groups of experts."""
    in_groups = preferences.reshape(*preferences.shape[:-1], routing.num_groups, -1)
    best_two = jax.lax.top_k(in_groups, min(2, in_groups.shape[-1]))[0]
    _, groups = jax.lax.top_k(jnp.sum(best_two, axis=-1), routing.groups_per_token)
    is_chosen = jnp.sum(jax.nn.one_hot(groups, routing.num_groups), axis=-2) > 0
    return jnp.where(is_chosen[..., None], in_groups, -jnp.inf).reshape(preferences.shape)


def expert_shares(config: MixtureConfig, router_logits: jax.Array) -> jax.Array:
    """Return each expert's weight (…, E), 0 where it is not chosen, by comparisons alone."""
    probabilities = jax.nn.softmax(router_logits.astype(jnp.float32), axis=-1)
    is_chosen = _is_chosen(probabilities, config.experts_per_token)
    kept: jax.Array = jnp.where(is_chosen, probabilities, 0)
    if not config.is_normalised:
        return kept
    shares: jax.Array = kept / jnp.sum(kept, axis=-1, keepdims=True)
    return shares


def mix_experts(
    config: MixtureConfig,
    x: jax.Array,
    router_logits: jax.Array,
    wi: jax.Array,
    wo: jax.Array,
    wi_bias: jax.Array | None = None,
    *,
    preferences: jax.Array | None = None,
) -> jax.Array:
    """Return what the chosen experts make of tokens (N, D) with router logits (N, E): (N, D).

    Biases of `wo` are left out.

    Args:
        preferences: (N, E), where the routing is grouped.
    """
    choice = choose_experts(config, router_logits, preferences)
    mix = _mix_every if len(x) <= _FEW_TOKENS else _mix_chosen
    return mix(config, x, choice, wi, wo, wi_bias)


def _activated(config: MixtureConfig, projected: jax.Array) -> jax.Array:
    if config.clamp is None:
        return activate(projected, config.activation)
    inner: jax.Array = clamped_gate(projected, config.clamp)
    return inner


def _mix_chosen(
    config: MixtureConfig,
    x: jax.Array,
    choice: ExpertChoice,
    wi: jax.Array,
    wo: jax.Array,
    wi_bias: jax.Array | None,
) -> jax.Array:
    """Multiply each token by its own experts' kernels."""
    dispatch = plan_dispatch(choice.experts.reshape(-1), config.num_experts)
    rows = dispatch.sorted_by_expert(jnp.repeat(x, config.experts_per_token, axis=0))
    weights = dispatch.sorted_by_expert(choice.weights.astype(x.dtype).reshape(-1, 1))
    projected = checkpoint_name(grouped_product(rows, wi, dispatch.ends), "mlp_in")
    if wi_bias is not None:
        # A product, whose gradient is one too: a lookup's would be a scatter that adds.
        experts = dispatch.sorted_by_expert(choice.experts.reshape(-1))
        of_rows = jax.nn.one_hot(experts, config.num_experts, dtype=wi_bias.dtype)
        projected = projected + jnp.tensordot(of_rows, wi_bias, 1)
    inner = _activated(config, projected) * weights
    outer = dispatch.sorted_by_token(grouped_product(inner, wo, dispatch.ends))
    return jnp.sum(outer.reshape(len(x), config.experts_per_token, -1), axis=1)


def _mix_every(
    config: MixtureConfig,
    x: jax.Array,
    choice: ExpertChoice,
    wi: jax.Array,
    wo: jax.Array,
    wi_bias: jax.Array | None,
) -> jax.Array:
    """Multiply each token by every expert's kernels; those not chosen weigh zero."""
    shares = jax.nn.one_hot(choice.experts, config.num_experts) * choice.weights[..., None]
    weights = jnp.sum(shares, axis=-2).T.astype(x.dtype)
    everywhere = jnp.broadcast_to(x, (config.num_experts, *x.shape))
    projected = jnp.einsum("end,edgf->engf", everywhere, wi)
    if wi_bias is not None:
        projected = projected + wi_bias[:, None]
    inner = _activated(config, projected) * weights[..., None]
    return jnp.sum(jnp.einsum("enf,efd->end", inner, wo), axis=0)


def load_balancing_losses(
    router_logits: jax.Array,
    experts_per_token: int,
    attention_mask: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
) -> jax.Array:
    """Return for each token the load-balancing loss of its text, (B, T), float32.

    It is about `experts_per_token` where all experts are used alike, and the more the fewer are
    used. A loss_fn adds up those of the tokens that it counts, so that a text weighs as much here
    as in the loss beside it:

        logits, router_logits = mixtral.apply_with_router(config, params, ids, mask)
        totals, weights = cross_entropy(logits, labels)
        losses = load_balancing_losses(router_logits, config.num_experts_per_tok, mask)
        balance = jnp.sum(losses * (labels >= 0), axis=1)
        totals = totals + config.router_aux_loss_coef * balance
        return totals, weights, {"load_balancing_loss": balance}

    Args:
        router_logits: (L, B, T, E), the second result of `apply_with_router`.
        attention_mask: (B, T); 0 is padding, which does not count and has loss 0.
        segment_ids: (B, T); which of the texts packed into a row each token belongs to, in runs.
            None: a row is one text.
    """
    probabilities = jax.nn.softmax(router_logits.astype(jnp.float32), axis=-1)
    _, *shape, num_experts = probabilities.shape
    chosen = _is_chosen(probabilities, experts_per_token).astype(jnp.float32)
    counted = jnp.ones(shape) if attention_mask is None else (attention_mask != 0)
    of_layers = [jnp.mean(each, axis=0) for each in (chosen, probabilities)]
    of_tokens = jnp.concatenate([*of_layers, jnp.ones((*shape, 1))], axis=-1) * counted[..., None]
    of_texts = _sums_of_texts(of_tokens, segment_ids)

    num_tokens = jnp.maximum(of_texts[..., -1:], 1.0)
    share_of_tokens, share_of_routing = jnp.split(of_texts[..., :-1] / num_tokens, 2, axis=-1)
    losses = num_experts * jnp.sum(share_of_tokens * share_of_routing, axis=-1)
    return jnp.where(counted != 0, losses, 0.0)


def _is_chosen(probabilities: jax.Array, experts_per_token: int) -> jax.Array:
    """Return a mask of a token's likeliest experts (…, E), of equals the first ones.

    As `mixture.choose_experts` does, by comparisons: they are computed where the tokens lie, and
    to sort tokens the compiler would bring all of a batch together.
    """
    experts = jnp.arange(probabilities.shape[-1])
    other, one = probabilities[..., None, :], probabilities[..., :, None]
    is_before = (other > one) | ((other == one) & (experts < experts[:, None]))
    return jnp.sum(is_before, axis=-1) < experts_per_token


def _sums_of_texts(of_tokens: jax.Array, segment_ids: jax.Array | None) -> jax.Array:
    """Give every token its text's sums: (B, T, F) to the same, or to (B, 1, F) of whole rows."""
    if segment_ids is None:
        return jnp.sum(of_tokens, axis=1, keepdims=True)
    is_next = segment_ids[:, 1:] != segment_ids[:, :-1]
    text = jnp.pad(jnp.cumsum(is_next, axis=1), ((0, 0), (1, 0)))
    add_up = partial(jax.ops.segment_sum, num_segments=of_tokens.shape[1], indices_are_sorted=True)
    return jnp.take_along_axis(jax.vmap(add_up)(of_tokens, text), text[..., None], axis=1)
