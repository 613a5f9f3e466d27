"""Decoder-only families: logits of padded or packed rows, prompts, caches and decoding steps.

Dims in this file: L layers, B batch, T sequence or new tokens, S prompt, V vocabulary, E experts,
N beams.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from redco_flow.engine.random import dropout, example_keys, fold_keys
from redco_flow.engine.step.lora_products import has_masks
from redco_flow.models.attention.bias import Biases, default_positions, row_biases
from redco_flow.models.attention.cache import (
    StepLayer,
    StepShared,
    WholeShared,
    no_writers,
    places_back,
    with_room,
    with_writers,
    written,
)
from redco_flow.models.attention.context import SequenceOrder, balanced_where_possible
from redco_flow.models.attention.rotary import Rotation, rotations
from redco_flow.models.config import ENDLESS_WINDOW, DecoderConfig
from redco_flow.models.families.family_config import FamilyConfig
from redco_flow.models.projections import product
from redco_flow.models.transformer.blocks import Norm, normal, zeros
from redco_flow.models.transformer.decoding_layers import (
    call_layer,
    cast_for_products,
    run_layers,
    step_layers,
    unstack_like,
    unstack_where_faster,
    without_layers,
)
from redco_flow.models.transformer.language_model import (
    Head,
    LanguageModel,
    LanguageModelFamily,
    Unscored,
)
from redco_flow.models.transformer.layer import Layer, scanned_layers

Params = dict[str, Any]

# Which derived key this is among those that an example's key gives.
_EMBEDDED, _LAYERS = range(2)


class Prompt(NamedTuple):
    """A batch of prompts as read, but for each one's last token, with which decoding begins.

    Attributes:
        is_visible: (B, S) whether a token may be attended to.
        positions: (B, S) position ids.
        last_token, last_position: (B,) int32.
    """

    is_visible: jax.Array
    positions: jax.Array
    last_token: jax.Array
    last_position: jax.Array


class Cache(NamedTuple):
    """The state from which a decoder decodes one more token.

    Attributes:
        source: the prompt, the same for all its beams and all steps.
        beams: which beam wrote each token of a hypothesis, (B, N, T): reordered.
        heads: keys and values of the prompt and of all beams' tokens since, (L, B, G, M, K)
            each, M = S + T N: `BlockedHeads`, or a tuple of layers' if the parameters are
            unstacked.
    """

    source: Prompt
    beams: jax.Array
    heads: Any


class Decoder(LanguageModel):
    """The whole model; the functions of `DecoderFamily` call it."""

    config: DecoderConfig

    def setup(self) -> None:
        """Declare the parameters."""
        c = self.config
        if c.cross_attention is not None:
            raise ValueError(
                "this decoder attends to what another model encodes (add_cross_attention): it is "
                "none by itself."
            )
        init = normal(c.init_stddev)
        self.embedding = self.param("embedding", init, (c.vocab_size, c.token_width))
        if c.num_positions:
            self.positions = self.param("positions", init, (c.num_positions, c.width))
        if c.embedding_width:
            self.project_in = self.param("project_in", init, (c.token_width, c.width))
            self.project_out = self.param("project_out", init, (c.width, c.token_width))
        if c.leading is not None:
            self.leading_layers = scanned_layers(c.leading, is_initializing=self.is_initializing())
        self.layers = scanned_layers(c, is_initializing=self.is_initializing())
        if c.has_final_norm:
            self.final_norm = Norm(c.norm, c.width)
        if not c.tie_word_embeddings:
            self.lm_head = self.param("lm_head", init, (c.token_width, c.vocab_size))
        if c.has_head_bias:
            self.lm_head_bias = self.param("lm_head_bias", zeros, (c.vocab_size,))

    def embed(self, ids: jax.Array, positions: jax.Array) -> jax.Array:
        """Look tokens up, (B, T) to (B, T, D), with their learned positions."""
        c = self.config
        hidden = self.look_up(ids, c.dtype)
        if c.embedding_width:
            hidden = product(hidden, self.project_in.astype(hidden.dtype))
        if c.num_positions:
            learned = self.positions.at[positions + c.position_offset].get(mode="clip")
            hidden = hidden + learned.astype(hidden.dtype)
        return hidden

    def before_head(self, hidden: jax.Array, router_logits: jax.Array | None = None) -> Unscored:
        """Bring the layers' result (B, T, D) to what the head takes."""
        c = self.config
        if c.has_final_norm:
            hidden = self.final_norm(hidden)
        if c.embedding_width:
            hidden = product(hidden, self.project_out.astype(hidden.dtype))
        if c.tie_word_embeddings:
            kernel = self.embedding.astype(hidden.dtype).T
        else:
            kernel = self.lm_head.astype(hidden.dtype)
        bias = self.lm_head_bias if c.has_head_bias else None
        return Unscored(hidden, Head(kernel, bias), router_logits)

    def declare(self) -> None:
        """Use every parameter that there is."""
        tokens = jnp.zeros((1, 1), jnp.int32)
        self.unscored(tokens, tokens, (), None)

    def unscored(
        self,
        input_ids: jax.Array,
        positions: jax.Array,
        biases: Biases,
        keys: jax.Array | None,
    ) -> Unscored:
        """Compute all but the logits."""
        c, order = self.config, self._order(input_ids.shape[1], keys)
        input_ids, positions = order.arranged(input_ids), order.arranged(positions)
        hidden = self.embed(input_ids, positions)
        hidden = dropout(hidden, c.embedding_dropout, keys, _EMBEDDED)
        shared = WholeShared(
            biases, self._rotations(positions), fold_keys(keys, _LAYERS), order=order
        )
        per_layer = self._per_layer()
        if c.leading is not None:
            first, per_layer = (
                jax.tree.map(lambda x, part=part: x[part], per_layer)
                for part in (slice(c.num_leading), slice(c.num_leading, None))
            )
            hidden, _ = self.leading_layers(hidden, first, shared)
        hidden, router_logits = self.layers(hidden, per_layer, shared)
        if router_logits is not None:
            router_logits = jax.vmap(order.restored)(router_logits)
        return self.before_head(order.restored(hidden), router_logits)

    def prefill(
        self,
        layers: Any,
        input_ids: jax.Array,
        positions: jax.Array,
        biases: Biases,
        num_places: int,
    ) -> Any:
        """Return the layers' keys and values with empty slots behind: the cache's `heads`."""
        shared = WholeShared(biases, self._rotations(positions), None)

        def run_layer(params: Params, hidden: jax.Array, own: tuple[Any, ...]) -> Any:
            layer = self._layer_of(params)
            hidden, heads = call_layer(layer, params, hidden, own, shared, method="prefill")
            return hidden, with_room(heads, num_places)

        embedded = self.embed(input_ids, positions)
        _, heads = run_layers(run_layer, layers, embedded, unstack_like(layers, self._per_layer()))
        return heads

    def step(
        self, layers: Any, cache: Cache, tokens: jax.Array, step: jax.Array
    ) -> tuple[jax.Array, Cache]:
        """Return logits (B, N, V), float32, and the cache with one position more."""
        source, writers = cache.source, with_writers(cache.beams, step)
        position = (source.last_position + step)[:, None]
        at_beams = jnp.broadcast_to(position, tokens.shape)
        num_read, num_beams = source.positions.shape[1], tokens.shape[1]
        shared = StepShared(
            slot=num_read + step * num_beams,
            is_visible=_joined(source.is_visible[:, None], written(writers, step)),
            back=_joined(position - source.positions, places_back(writers, step)),
            rotations=self._rotations(at_beams),
        )
        _, windows, rotaries = self._per_layer()
        own = unstack_like(layers, StepLayer(windows, rotaries))
        hidden = self.embed(tokens, at_beams)
        hidden, heads = step_layers(self._layer_of, layers, hidden, cache.heads, own, shared)
        return self.logits(hidden), cache._replace(beams=writers, heads=heads)

    def _layer_of(self, params: Params) -> Layer:
        leading = self.config.leading if "mlp" in params else None
        return Layer(self.config if leading is None else leading, parent=None)

    def _order(self, length: int, keys: jax.Array | None) -> SequenceOrder:
        """Return the order in which tokens go through the layers."""
        c = self.config
        # With a window shards are balanced in the text's order; dropout's masks belong to places.
        is_alike = not c.attention.is_causal or c.common_window is not None
        if is_alike or has_masks.value or (keys is not None and c.drops):
            return SequenceOrder()
        return balanced_where_possible(length)

    def _rotations(self, positions: jax.Array) -> tuple[Rotation, ...]:
        return rotations(self.config.rotary_choices, positions)

    def _per_layer(self) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
        """Return each layer's index, its window and which rotation it has, where they differ."""
        c = self.config
        rotaries = None
        if len(c.rotary_choices) > 1:
            numbers = [c.rotary_choices.index(rotary) for rotary in c.rotaries]
            rotaries = jnp.asarray(numbers, jnp.int32)
        windows = None
        if not c.has_common_window:
            windows = jnp.asarray([w or ENDLESS_WINDOW for w in c.windows], jnp.int32)
        return jnp.arange(c.num_leading + c.num_layers), windows, rotaries


def _joined(of_prompt: jax.Array, of_tokens: jax.Array) -> jax.Array:
    """Lay (…, S) and (…, T N) side by side; either may be the same for all beams or rows."""
    lead = jnp.broadcast_shapes(of_prompt.shape[:-1], of_tokens.shape[:-1])
    parts = [jnp.broadcast_to(part, (*lead, part.shape[-1])) for part in (of_prompt, of_tokens)]
    return jnp.concatenate(parts, axis=-1)


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
