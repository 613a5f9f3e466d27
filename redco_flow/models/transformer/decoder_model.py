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
from redco_flow.models.attention.cache import no_writers
from redco_flow.models.families.family_config import FamilyConfig
from redco_flow.models.random import example_keys
from redco_flow.models.transformer.decoder_module import Cache, Decoder, Params, Prompt
from redco_flow.models.transformer.decoding_layers import (
    cast_for_products,
    unstack_where_faster,
    without_layers,
)
from redco_flow.models.transformer.head import Unscored
from redco_flow.models.transformer.language_model import LanguageModelFamily


@dataclass(frozen=True)
class DecoderFamily(LanguageModelFamily[FamilyConfig]):
    """A decoder-only family."""

    module = Decoder

    def apply_with_router(
        self, config: FamilyConfig, params: Params, *inputs: Any, **named: Any
    ) -> tuple[jax.Array, jax.Array | None]:
        """Return the logits as `apply` does, and the router logits (L, B, T, E), float32.

        The second is None for a model without experts; `experts.load_balancing_losses` reads it.
        """
        hidden, head, router_logits = self.apply_before_head(config, params, *inputs, **named)
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
        """Return the hidden states and the head, from which `score` computes the logits.

        Args:
            input_ids: (B, T).
            attention_mask: (B, T); 0 is padding, on either side. None: there is none.
            position_ids: (B, T); None: counted from 0 over what is not padding, from 0 again
                in every document.
            segment_ids: (B, T); which of the documents packed into a row each token belongs to, in
                runs. No token attends to another document. None: a row is one document.
            rngs: (B,) keys, one per example, for dropout; None: no dropout.
        """
        keys = example_keys(rngs, input_ids.shape[0])
        if position_ids is None:
            position_ids = default_positions(input_ids.shape, attention_mask, segment_ids)
        biases = row_biases(attention_mask, segment_ids)
        inputs = (input_ids, position_ids, biases, keys)
        result: Unscored = self._run(config, params, *inputs, method="unscored")
        return result

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
