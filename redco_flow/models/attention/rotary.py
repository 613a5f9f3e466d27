"""Rotary positions: each pair of a head's dims is turned by an angle that grows with position.

Pure functions of arrays; angles are float32 whatever the heads are.
Dims in this file: B batch, T sequence, H heads, K head dim, R rotated pairs.
Source: Su et al. 2021; scaling as published with LLaMA 3.1 and checked against transformers.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from redco_flow.models.config import RopeScaling, RotaryConfig


class Rotation(NamedTuple):
    """Cosines and sines of every position's angles, (B, T, R) float32 each."""

    cos: jax.Array
    sin: jax.Array


def frequencies(config: RotaryConfig) -> NDArray[np.float32]:
    """Return radians per position of each rotated pair, (R,)."""
    exponents = np.arange(0, config.num_dims, 2, dtype=np.float64) / config.num_dims
    plain = config.theta**-exponents
    scaled = plain if config.scaling is None else _scaled(plain, config.scaling)
    return scaled.astype(np.float32)


def _scaled(plain: NDArray[np.float64], scaling: RopeScaling) -> NDArray[np.float64]:
    if scaling.rope_type == "linear":
        return plain / scaling.factor
    # Turns within the pretrained length decide: few are stretched, many are kept.
    turns = scaling.original_max_position_embeddings * plain / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return plain * (kept + (1 - kept) / scaling.factor)


def rotation(config: RotaryConfig, positions: jax.Array) -> Rotation:
    """Return the angles of positions (B, T)."""
    angles = positions[..., None].astype(jnp.float32) * frequencies(config)
    return Rotation(jnp.cos(angles), jnp.sin(angles))


def rotate(config: RotaryConfig, heads: jax.Array, rotation: Rotation) -> jax.Array:
    """Turn the first `num_dims` of each head (B, T, H, K) by its position's angles."""
    rotated, rest = jnp.split(heads.astype(jnp.float32), [config.num_dims], axis=-1)
    cos, sin = rotation.cos[:, :, None], rotation.sin[:, :, None]
    if config.is_interleaved:
        one, other = rotated[..., ::2], rotated[..., 1::2]
        pair = (one * cos - other * sin, other * cos + one * sin)
        turned = jnp.stack(pair, axis=-1).reshape(rotated.shape)
    else:
        one, other = jnp.split(rotated, 2, axis=-1)
        turned = jnp.concatenate([one * cos - other * sin, other * cos + one * sin], axis=-1)
    return jnp.concatenate([turned, rest], axis=-1).astype(heads.dtype)
