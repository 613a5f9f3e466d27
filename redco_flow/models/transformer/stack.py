"""Layers with positions and norms around them: an encoder, or a decoder of two stacks.

Over whole sequences, or token by token with a cache.
Dims in this file: B batch, T sequence, S source, N beams, M cache slots, D model,
P positions, H heads, G key-value groups, K head dim.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from redco_flow.engine.random import dropout, fold_keys
from redco_flow.models.attention.bias import (
    Bias,
    Biases,
    ByDistance,
    distance_bias,
    spread_diagonals,
)
from redco_flow.models.attention.cache import (
    BlockedHeads,
    StepLayer,
    StepShared,
    WholeShared,
    with_room,
)
from redco_flow.models.attention.context import num_context_shards
from redco_flow.models.config import StackConfig
from redco_flow.models.numerics import MASKED
from redco_flow.models.projections import num_groups_held
from redco_flow.models.transformer.blocks import Norm, normal
from redco_flow.models.transformer.decoding_layers import (
    call_layer,
    run_layers,
    step_layers,
    unstack_like,
)
from redco_flow.models.transformer.layer import Layer, scanned_layers

# Which derived key this is among those that an example's key gives.
_EMBEDDED, _LAYERS, _LAST = range(3)


class Stack(nn.Module):
    """The layers, their parameters with a leading dim of their number, and what is around them.

    `positions` (P, D), `relative_bias` (buckets, H), `embedding_norm` and `final_norm` are there
    where the config has them.
    """

    config: StackConfig

    def setup(self) -> None:
        """Declare the parts."""
        c = self.config
        if c.num_positions:
            shape = (c.num_positions, c.width)
            self.positions = self.param("positions", normal(c.init_stddev), shape)
        if c.relative is not None:
            shape = (c.relative.num_buckets, c.attention.num_heads)
            self.relative_bias = self.param("relative_bias", normal(c.stddev(c.width)), shape)
        if c.has_embedding_norm:
            self.embedding_norm = Norm(c.norm, c.width)
        self.layers = scanned_layers(c, is_initializing=self.is_initializing())
        if c.has_final_norm:
            self.final_norm = Norm(c.norm, c.width)

    def __call__(
        self,
        embedded: jax.Array,
        positions: jax.Array,
        biases: Biases,
        keys: jax.Array | None,
        encoded: jax.Array | None = None,
        encoded_bias: Bias | None = None,
    ) -> jax.Array:
        """Map embeddings (B, T, D) to what the last layer or the final norm gives.

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
        biases = (*self._relative_biases(embedded.shape[1]), *biases)
        shared = WholeShared(biases, (), fold_keys(keys, _LAYERS), encoded, encoded_bias)
        last: jax.Array
        last, _ = self.layers(hidden, (self._layer_numbers, None, None), shared)
        return dropout(self._finished(last), self.config.final_dropout, keys, _LAST)

    def source_heads(self, layers: Any, encoded: jax.Array) -> Any:
        """Return the layers' keys and values of the source, (B, G, S, K) each, as they are laid."""
        layer = Layer(self.config, parent=None)

        def run_layer(params: Any, carry: None, own: None) -> Any:
            heads = call_layer(layer, params, encoded, method="source_heads")
            return carry, with_room(heads, 0)

        _, heads = run_layers(run_layer, layers, None, unstack_like(layers, None))
        return heads

    def no_heads(self, layers: Any, batch_size: int, num_places: int, dtype: jnp.dtype) -> Any:
        """Return room for the layers' keys and values of the tokens, (B, G, M, K) each."""
        c = self.config
        num_groups = num_groups_held(c.attention.num_kv_heads, c.attention.num_heads)
        shape = (c.num_layers, batch_size, num_groups, num_places, c.attention.head_dim)
        heads = BlockedHeads(((jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)),))
        return unstack_like(layers, heads)

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
        placed = self._placed(embedded, step)
        last, heads = step_layers(lambda _: layer, layers, placed, heads, own, shared)
        return self._finished(last), heads

    def bias_by_step(self, max_length: int) -> jax.Array | None:
        """Return (H, 2 T - 1): the keys' bias at step t is its slice of T from T - 1 - t.

        None where positions add nothing to scores.
        """
        if self.config.relative is None:
            return None
        bias = self._distance_bias(np.arange(1 - max_length, 1))
        return jnp.pad(bias, ((0, 0), (0, max_length - 1)), constant_values=MASKED)

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
        """Add learned positions and bring the sum to the first layer's scale."""
        if self.config.num_positions:
            rows = positions + self.config.position_offset
            embedded = embedded + self.positions.at[rows].get(mode="clip").astype(embedded.dtype)
        if not self.config.has_embedding_norm:
            return embedded
        placed: jax.Array = self.embedding_norm(embedded)
        return placed

    def _finished(self, hidden: jax.Array) -> jax.Array:
        """Apply the final norm, where there is one."""
        if not self.config.has_final_norm:
            return hidden
        normed: jax.Array = self.final_norm(hidden)
        return normed

    def _relative_biases(self, length: int) -> Biases:
        """Return what distances add to the scores, (1, H, T, T) or by blocks."""
        if self.config.relative is None:
            return ()
        by_distance = self._distance_bias(np.arange(1 - length, length))
        if num_context_shards() > 1:
            return (ByDistance(by_distance, length),)
        return (spread_diagonals(by_distance, length, length)[None],)

    def _distance_bias(self, distances: np.ndarray) -> jax.Array:
        """Return the bias (H, N) of each distance, key position minus query position."""
        relative = self.config.relative
        assert relative is not None
        return distance_bias(
            self.relative_bias,
            distances,
            bidirectional=not self.config.attention.is_causal,
            max_distance=relative.max_distance,
        )
