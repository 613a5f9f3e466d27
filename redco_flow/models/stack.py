"""Layers with learned positions and a norm before the first: an encoder, or a decoder of two.

Over whole sequences, or token by token with a cache.
Dims in this file: B batch, T sequence, S source, N beams, M places in the cache, D model,
P positions, G key-value groups, K head dim.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from redco_flow.models.blocks import Norm, normal
from redco_flow.models.blockwise_bias import Bias, Biases
from redco_flow.models.dropout import dropout, fold_keys
from redco_flow.models.key_value_cache import with_room
from redco_flow.models.layer import Layer, scanned_layers
from redco_flow.models.layer_inputs import StepLayer, StepShared, WholeShared
from redco_flow.models.layers_apart import call_layer, laid_like, run_layers, step_layers
from redco_flow.models.projections import num_groups_held
from redco_flow.models.stack_config import StackConfig

# Which derived key this is among those that an example's key gives.
_EMBEDDED, _LAYERS = range(2)


class Stack(nn.Module):
    """Positions (P, D), `embedding_norm`, and `layers` with a leading dim of their number."""

    config: StackConfig

    def setup(self) -> None:
        """Declare the parts."""
        c = self.config
        self.positions = self.param(
            "positions", normal(c.init_deviation), (c.num_positions, c.width)
        )
        self.embedding_norm = Norm(c.norm, c.width)
        self.layers = scanned_layers(c)

    def __call__(
        self,
        embedded: jax.Array,
        positions: jax.Array,
        biases: Biases,
        keys: jax.Array | None,
        encoded: jax.Array | None = None,
        encoded_bias: Bias | None = None,
    ) -> jax.Array:
        """Map embeddings (B, T, D) to what the last layer gives.

        Args:
            positions: (T) or (B, T), without the offset.
            biases: what rows hide, each broadcasting to (B, 1, T, T).
            keys: raw dropout keys (B, 2).
            encoded: (B, S, D) for cross-attention, with what hides its padding (B, 1, 1, S).

        Raises:
            ValueError: the sequences are longer than the positions reach.
        """
        self.check_length(embedded.shape[1])
        hidden = self._placed(embedded, positions)
        hidden = dropout(hidden, self.config.embedding_dropout, keys, _EMBEDDED)
        shared = WholeShared(biases, None, fold_keys(keys, _LAYERS), encoded, encoded_bias)
        last: jax.Array
        last, _ = self.layers(hidden, (self._layer_numbers, None), shared)
        return last

    def source_heads(self, layers: Any, encoded: jax.Array) -> Any:
        """Return the layers' keys and values of the source, (B, G, S, K) each, as they are laid."""
        layer = Layer(self.config, parent=None)

        def run_layer(params: Any, carry: None, own: None) -> Any:
            heads = call_layer(layer, params, encoded, method="source_heads")
            return carry, with_room(heads, 0)

        _, heads = run_layers(run_layer, layers, None, laid_like(layers, None))
        return heads

    def no_heads(self, layers: Any, batch_size: int, num_places: int, dtype: jnp.dtype) -> Any:
        """Return room for the layers' keys and values of the tokens, (B, G, M, K) each."""
        c = self.config
        num_groups = num_groups_held(c.attention.num_kv_heads, c.attention.num_heads)
        shape = (c.num_layers, batch_size, num_groups, num_places, c.attention.head_dim)
        return laid_like(layers, (jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)))

    def step(
        self,
        layers: Any,
        embedded: jax.Array,
        heads: Any,
        source: Any,
        shared: StepShared,
        step: jax.Array,
    ) -> tuple[jax.Array, Any]:
        """Map one token of each beam, (B, N, D), and return the cache with it in."""
        own: Any = StepLayer(source=source)
        if isinstance(layers, tuple):
            own = tuple(StepLayer(source=kept) for kept in source)
        layer = Layer(self.config, parent=None)
        return step_layers(layer, layers, self._placed(embedded, step), heads, own, shared)

    def check_length(self, length: int) -> None:
        """Raise ValueError if the positions do not reach so far."""
        longest = self.config.max_length
        if length > longest:
            raise ValueError(
                f"sequences are {length} tokens long; the model has learned positions for "
                f"{longest}. Cut the texts shorter, or take a model with more "
                "(max_position_embeddings)."
            )

    @property
    def _layer_numbers(self) -> jax.Array:
        return jnp.arange(self.config.num_layers)

    def _placed(self, embedded: jax.Array, positions: jax.Array) -> jax.Array:
        """Add positions and bring the sum to the first layer's scale."""
        rows = positions + self.config.position_offset
        learned = self.positions.at[rows].get(mode="clip").astype(embedded.dtype)
        placed: jax.Array = self.embedding_norm(embedded + learned)
        return placed
