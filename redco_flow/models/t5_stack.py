"""T5's encoder or decoder: scanned layers, a relative bias for all of them and a last norm.

Dims in this file: B batch, T sequence, D model, H heads.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from redco_flow.models.attention import MASKED, causal_bias, rms_norm
from redco_flow.models.blockwise_bias import Bias, ByDistance
from redco_flow.models.context_axis import num_context_shards
from redco_flow.models.dropout import dropout, fold_keys
from redco_flow.models.relative_position import distance_bias, pairwise_bias
from redco_flow.models.t5_config import T5Config
from redco_flow.models.t5_layers import DecoderLayer, EncoderLayer, constant, normal


class T5Stack(nn.Module):
    """The parameters `layers`, with a leading layer dim, `relative_bias` and `final_norm`."""

    config: T5Config
    is_decoder: bool

    def setup(self) -> None:
        """Declare the parameters."""
        c = self.config
        layer_type: Any = DecoderLayer if self.is_decoder else EncoderLayer
        if c.remat:
            layer_type = nn.remat(layer_type, prevent_cse=False)
        self.layers = nn.scan(
            layer_type,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=(0, nn.broadcast),
        )(c)
        shape = (c.relative_attention_num_buckets, c.num_heads)
        self.relative_bias = self.param("relative_bias", normal(c, c.d_model), shape)
        self.final_norm = self.param("final_norm", constant(c), (c.d_model,))

    @property
    def _layer_indices(self) -> jax.Array:
        c = self.config
        return jnp.arange(c.num_decoder_layers if self.is_decoder else c.num_layers)

    def position_bias(self, length: int) -> Bias:
        """Return what positions add and hide, (1, H, T, T) or told by blocks."""
        kind: dict[str, Any] = {
            "bidirectional": not self.is_decoder,
            "max_distance": self.config.relative_attention_max_distance,
        }
        if num_context_shards() > 1:
            values = distance_bias(self.relative_bias, np.arange(1 - length, length), **kind)
            return ByDistance(values, length, is_causal=self.is_decoder)
        bias = pairwise_bias(self.relative_bias, length, length, **kind)
        return bias + causal_bias(length) if self.is_decoder else bias

    def cached_position_bias(self, max_length: int) -> jax.Array:
        """Return (H, 2 T - 1): the keys' bias at step t is its slice of T from T - 1 - t."""
        bias = distance_bias(
            self.relative_bias,
            np.arange(-(max_length - 1), 1),
            bidirectional=False,
            max_distance=self.config.relative_attention_max_distance,
        )
        return jnp.pad(bias, ((0, 0), (0, max_length - 1)), constant_values=MASKED)

    def __call__(
        self, hidden: jax.Array, shared: tuple[Any, ...], keys: jax.Array | None, sites: range
    ) -> jax.Array:
        """Run all layers; `sites` are the derived keys for input, output and layers."""
        rate = self.config.dropout_rate
        hidden = dropout(hidden, rate, keys, sites[0])
        layer_keys = fold_keys(keys, sites[2])
        hidden, _ = self.layers(hidden, self._layer_indices, (*shared, layer_keys))
        return dropout(self.finish(hidden), rate, keys, sites[1])

    def finish(self, hidden: jax.Array) -> jax.Array:
        """Apply the last norm."""
        normed: jax.Array = rms_norm(hidden, self.final_norm, self.config.layer_norm_epsilon)
        return normed
