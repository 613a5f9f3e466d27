"""Layers with learned positions and a norm before the first: an encoder, or a decoder of two.

Over whole sequences, or token by token with a cache. Refuses to know vocabularies and heads.
Dims in this file: L layers, B batch, T sequence, S source, N beams, D model, P positions, G
key-value groups, C new tokens, K head dim.
"""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from redco_flow.models.blocks import Norm, normal
from redco_flow.models.blockwise_bias import Bias, Biases
from redco_flow.models.dropout import dropout, fold_keys
from redco_flow.models.layer import scanned_layers
from redco_flow.models.layer_inputs import KeysValues, StepLayer, StepShared, WholeShared
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
        methods = () if c.cross_attention is None else ("source_heads", "step")
        self.layers = scanned_layers(c, *methods)

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
        self._check_length(embedded.shape[1])
        hidden = self._placed(embedded, positions)
        hidden = dropout(hidden, self.config.embedding_dropout, keys, _EMBEDDED)
        shared = WholeShared(biases, None, fold_keys(keys, _LAYERS), encoded, encoded_bias)
        last: jax.Array
        last, _ = self.layers(hidden, (self._layer_numbers, None), shared)
        return last

    def source_heads(self, encoded: jax.Array) -> KeysValues:
        """Return every layer's keys and values of the source, (L, B, S, G, K) each."""
        stacked: KeysValues
        _, stacked = self.layers.source_heads(None, (self._layer_numbers, None), encoded)
        return stacked

    def empty_cache(
        self, batch_size: int, num_beams: int, max_length: int, dtype: jnp.dtype
    ) -> dict[str, jax.Array]:
        """Return room for the tokens' keys and values, (L, B, N, G, C, K) each.

        Raises:
            ValueError: more tokens than the positions reach.
        """
        self._check_length(max_length)
        attention = self.config.attention
        num_groups = num_groups_held(attention.num_kv_heads, attention.num_heads)
        shape = (batch_size, num_beams, num_groups, max_length, attention.head_dim)
        empty = jnp.zeros((self.config.num_layers, *shape), dtype)
        return {"keys": empty, "values": empty}

    def step(
        self,
        embedded: jax.Array,
        beams: dict[str, jax.Array],
        source: KeysValues,
        encoded_bias: Bias,
        step: jax.Array,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Map one token of each beam, (B, N, D), and return the cache with it in."""
        hidden = self._placed(embedded, step)
        carry = (hidden, beams["keys"], beams["values"])
        own = StepLayer(self._layer_numbers, source=source)
        shared = StepShared(step, encoded_bias=encoded_bias)
        (hidden, keys, values), _ = self.layers.step(carry, own, shared)
        return hidden, {"keys": keys, "values": values}

    @property
    def _layer_numbers(self) -> jax.Array:
        return jnp.arange(self.config.num_layers)

    def _placed(self, embedded: jax.Array, positions: jax.Array) -> jax.Array:
        """Add positions and bring the sum to the first layer's scale."""
        rows = positions + self.config.position_offset
        learned = self.positions.at[rows].get(mode="clip").astype(embedded.dtype)
        placed: jax.Array = self.embedding_norm(embedded + learned)
        return placed

    def _check_length(self, length: int) -> None:
        longest = self.config.max_length
        if length > longest:
            raise ValueError(
                f"sequences are {length} tokens long; the model has learned positions for "
                f"{longest}. Cut the texts shorter, or take a model with more "
                "(max_position_embeddings)."
            )
