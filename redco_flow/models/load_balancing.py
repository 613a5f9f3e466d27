"""The loss that keeps a mixture's router from sending all tokens to a few experts.

Of each text by itself: over all layers and its own tokens, so that a text costs the same whatever
stands beside it in a row, a batch or a micro-batch.
Dims in this file: L layers, B batch, T sequence, E experts, K experts per token, F numbers that
are added up for each token.
Source: Fedus et al. 2021, equations 4 to 6, as transformers computes it for Mixtral; differs: per
text, as DeepSeek-AI 2024 (DeepSeek-V3, equations 17 to 20), and not over the whole batch.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp


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
    """Say which experts (…, E) are a token's likeliest, of equals those that stand first.

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
