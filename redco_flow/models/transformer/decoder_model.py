"""Decoder-only families: logits of padded or packed rows, prompts, caches and decoding steps.

The parameters and what they compute are in `decoder_module.py`.
Dims in this file: L layers, B batch, T sequence or new tokens, S prompt, V vocabulary, E experts,
N beams.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from redco_flow.models.attention.bias import default_positions, row_biases
from redco_flow.models.attention.cache import no_writers, with_room_for
from redco_flow.models.families.family_config import FamilyConfig
from redco_flow.models.family import ModelFamily
from redco_flow.models.random import example_keys
from redco_flow.models.transformer.decoder_module import Cache, Decoder, Params, Prompt
from redco_flow.models.transformer.decoding_layers import (
    cast_for_products,
    unstack_where_faster,
    without_layers,
)
from redco_flow.models.transformer.head import Head, Unscored
from redco_flow.models.transformer.head import score as score_with


@dataclass(frozen=True)
class DecoderFamily(ModelFamily[FamilyConfig]):
    """A decoder-only family."""

    module = Decoder

    def apply(
        self,
        config: FamilyConfig,
        params: Params,
        input_ids: jax.Array,
        attention_mask: jax.Array | None = None,
        position_ids: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        rngs: jax.Array | None = None,
    ) -> jax.Array:
        """Return float32 logits (B, T, V) of every next token.

        Args:
            input_ids: (B, T).
            attention_mask: (B, T); 0 is padding, on either side. None: there is none.
            position_ids: (B, T); None: counted from 0 over what is not padding, from 0 again
                in every document.
            segment_ids: (B, T); which of the documents packed into a row each token belongs to, in
                runs. No token attends to another document. None: a row is one document.
            rngs: (B,) keys, one per example, for dropout; None: no dropout.
        """
        logits, _ = self.apply_with_router(
            config, params, input_ids, attention_mask, position_ids, segment_ids, rngs
        )
        return logits

    def apply_with_router(
        self,
        config: FamilyConfig,
        params: Params,
        input_ids: jax.Array,
        attention_mask: jax.Array | None = None,
        position_ids: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        rngs: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array | None]:
        """Return what `apply` does, and every layer's router logits (L, B, T, E), float32.

        The second is None for a model without experts; `experts.load_balancing_losses` reads it.
        """
        hidden, head, router_logits = self.apply_before_head(
            config, params, input_ids, attention_mask, position_ids, segment_ids, rngs
        )
        return self.score(config, head, hidden), router_logits

    def apply_before_head(
        self,
        config: FamilyConfig,
        params: Params,
        input_ids: jax.Array,
        attention_mask: jax.Array | None = None,
        position_ids: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        rngs: jax.Array | None = None,
    ) -> Unscored:
        """Return what `score` makes the logits of; arguments are those of `apply`."""
        keys = example_keys(rngs, input_ids.shape[0])
        if position_ids is None:
            position_ids = default_positions(input_ids.shape, attention_mask, segment_ids)
        biases = row_biases(attention_mask, segment_ids)
        inputs = (input_ids, position_ids, biases, keys)
        result: Unscored = self._run(config, params, *inputs, method="unscored")
        return result

    def score(self, config: FamilyConfig, head: Head, hidden: jax.Array) -> jax.Array:
        """Return float32 logits (…, V) of any tokens' hidden states (…, D)."""
        return score_with(config.core.logit_cap, head, hidden)

    def decoding_params(self, config: FamilyConfig, params: Params) -> Params:
        """Return parameters from which `prefill` and `decode_step` give the same, faster.

        Kernels are cast to the products' dtype, and the layers unstacked where that is faster,
        once for all steps.
        """
        rest, layers = without_layers(cast_for_products(params, config.core.dtype))
        return {**rest, "layers": unstack_where_faster(layers)}

    def prefill(
        self,
        config: FamilyConfig,
        params: Params,
        input_ids: jax.Array,
        attention_mask: jax.Array,
        *,
        num_beams: int,
        max_length: int,
        room: int | None = None,
    ) -> Cache:
        """Read prompts; return the cache before the first step, with room for what follows.

        Args:
            input_ids, attention_mask: (B, S); mask 0 is padding, on either side. Every row has a
                token; its last one, the cache's `source.last_token`, is where decoding begins.
            max_length: how many tokens will be decoded at most.
            room: for how many of them there is room at first, before `grow_cache`; None: for all.
        """
        room = max_length if room is None else room
        is_token = attention_mask != 0
        positions = default_positions(input_ids.shape, attention_mask, None)
        places = jnp.arange(input_ids.shape[1])
        last = jnp.max(jnp.where(is_token, places, 0), axis=1)[:, None]
        biases = row_biases(attention_mask, None)
        inputs = (input_ids, positions, biases, num_beams * room)
        prompt = Prompt(
            is_visible=is_token & (places != last),
            positions=positions,
            last_token=jnp.take_along_axis(input_ids, last, axis=1)[:, 0].astype(jnp.int32),
            last_position=jnp.take_along_axis(positions, last, axis=1)[:, 0],
        )
        heads = self._run_with_layers(config, params, *inputs, method="prefill")
        return Cache(prompt, no_writers(len(input_ids), num_beams, room), heads)

    def grow_cache(self, cache: Cache, num_tokens: int) -> Cache:
        """Return the cache with room for this number of new tokens."""
        return with_room_for(cache, num_tokens)

    def decode_step(
        self,
        config: FamilyConfig,
        params: Params,
        cache: Cache,
        tokens: jax.Array,
        position: jax.Array,
    ) -> tuple[jax.Array, Cache]:
        """Return float32 logits (B, N, V) of the token after `tokens` (B, N), and the new cache.

        Args:
            position: number of the step, from 0, where `tokens` are the prompts' last ones.
        """
        result: tuple[jax.Array, Cache] = self._run_with_layers(
            config, params, cache, tokens, position, method="step"
        )
        return result

    def _run_with_layers(
        self, config: FamilyConfig, params: Params, *inputs: Any, method: str
    ) -> Any:
        """Call a method that is given the layers' parameters, stacked or not."""
        rest, layers = without_layers(params)
        return self._run(config, rest, layers, *inputs, method=method)
