"""A small CNN that classifies images, for data too few for a ViT; its layout is no publication's.

    model: {family: redco_flow.models.cnn, config: {num_filters: 16}}

Convolutions of 3 by 3, each with twice the filters of the one before and half the rows and columns,
then the mean over what is left of the image. In float32.
Dims in this file: B batch, X image side, C channels, Y classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from redco_flow.engine.random import dropout, example_keys

Params = dict[str, Any]


@dataclass(frozen=True)
class Config:
    """Its shape.

    Args:
        num_filters: of the first convolution.
        num_layers: convolutions.
        dropout: of what is classified.
    """

    image_size: int = 32
    num_channels: int = 3
    num_labels: int = 2
    num_filters: int = 32
    num_layers: int = 3
    dropout: float = 0.0
    dtype: str = "float32"

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type == "int" and (type(value) is not int or value < 1):
                raise ValueError(f"cnn config: {field.name} is {value!r}; it must be at least 1.")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"cnn config: dropout is {self.dropout!r}; it must be in [0, 1).")
        if self.dtype != "float32":
            raise ValueError(f"cnn config: dtype is {self.dtype!r}; it computes in float32 alone.")

    def updated(self, values: Mapping[str, Any]) -> Config:
        """Return a copy with `values` in place; `dropout_rate` is `dropout`.

        Raises:
            ValueError: a key that is no field, or a bad value.
        """
        values = dict(values)
        if "dropout_rate" in values:
            values["dropout"] = values.pop("dropout_rate")
        known = [field.name for field in fields(self)]
        if unknown := [key for key in values if key not in known]:
            raise ValueError(
                f"cnn config has no key {', '.join(unknown)}. Known keys: {', '.join(known)}."
            )
        return replace(self, **values)


class Cnn(nn.Module):
    """The whole model."""

    config: Config

    @nn.compact
    def __call__(self, images: jax.Array, keys: jax.Array | None) -> jax.Array:
        """Map images (B, X, X, C) to logits (B, Y)."""
        hidden = images
        for layer in range(self.config.num_layers):
            strides = 1 if layer == 0 else 2
            conv = nn.Conv(self.config.num_filters << layer, (3, 3), strides, name=f"conv_{layer}")
            hidden = nn.relu(conv(hidden))
        pooled = dropout(jnp.mean(hidden, axis=(1, 2)), self.config.dropout, keys, 0)
        logits: jax.Array = nn.Dense(self.config.num_labels, name="classifier")(pooled)
        return logits


@partial(jax.jit, static_argnums=0)
def init_params(config: Config, key: jax.Array) -> Params:
    """Draw float32 parameters."""
    images = jnp.zeros((1, config.image_size, config.image_size, config.num_channels))
    params: Params = Cnn(config).init(key, images, None)["params"]
    return params


def abstract_params(config: Config) -> Params:
    """Return the parameters' shapes and dtypes, allocating nothing."""
    shapes: Params = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    return shapes


def apply(
    config: Config, params: Params, images: jax.Array, rngs: jax.Array | None = None
) -> jax.Array:
    """Return logits (B, Y).

    Args:
        rngs: (B,) keys, one per example, for dropout; None: no dropout.
    """
    keys = example_keys(rngs, images.shape[0])
    logits: Any = Cnn(config).apply({"params": params}, images, keys)
    found: jax.Array = logits
    return found
