"""Rotary positions: each pair of a head's dims is turned by an angle that grows with position.

Pure functions of arrays; angles are float32 whatever the heads are.
Dims in this file: B batch, T sequence, H heads, K head dim, R rotated pairs.
Source: Su et al. 2021; scaling as published with LLaMA 3.1 and checked against transformers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from redco_flow.models.attention.rope import RotaryConfig, yarn_factor


class Rotation(NamedTuple):
    """Cosines and sines of every position's angles, (B, T, R) float32 each."""

    cos: jax.Array
    sin: jax.Array


def frequencies(config: RotaryConfig) -> NDArray[np.float32]:
    """Return radians per position of each rotated pair, (R,)."""
    exponents = np.arange(0, config.num_dims, 2, dtype=np.float64) / config.num_dims
    plain = config.theta**-exponents
    scaled = plain if config.scaling is None else _SCALED[config.scaling.rope_type](config, plain)
    return scaled.astype(np.float32)


def _linear(config: RotaryConfig, plain: NDArray[np.float64]) -> NDArray[np.float64]:
    assert config.scaling is not None
    return plain / config.scaling.factor


def _llama3(config: RotaryConfig, plain: NDArray[np.float64]) -> NDArray[np.float64]:
    """Turns within the pretrained length decide: few are stretched, many are kept."""
    scaling = config.scaling
    assert scaling is not None
    turns = scaling.original_length * plain / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    assert low is not None
    assert high is not None
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return plain * (kept + (1 - kept) / scaling.factor)


def _yarn(config: RotaryConfig, plain: NDArray[np.float64]) -> NDArray[np.float64]:
    """As `_llama3`, but gradually by the pair's number and not by its frequency."""
    scaling = config.scaling
    assert scaling is not None
    length = scaling.original_length

    def pair_of(turns: float) -> float:
        return config.num_dims * math.log(length / (turns * 2 * math.pi)) / 2 / log_theta

    log_theta = math.log(config.theta)
    low, high = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.num_dims - 1)
    # Where both are the same pair transformers steps within a thousandth of it.
    stretched = np.clip((np.arange(len(plain)) - low) / ((high - low) or 0.001), 0, 1)
    scaled: NDArray[np.float64] = plain * (1 - stretched + stretched / scaling.factor)
    return scaled


def _longrope(config: RotaryConfig, plain: NDArray[np.float64]) -> NDArray[np.float64]:
    assert config.scaling is not None
    scaled: NDArray[np.float64] = plain / np.asarray(config.scaling.short_factor)
    return scaled


_SCALED = {"linear": _linear, "llama3": _llama3, "yarn": _yarn, "longrope": _longrope}


def attention_factor(config: RotaryConfig) -> float:
    """Return what cosines and sines are multiplied by, queries and keys alike."""
    scaling = config.scaling
    if scaling is None or scaling.rope_type not in ("yarn", "longrope"):
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.rope_type == "longrope":
        length = scaling.original_length
        return math.sqrt(1 + math.log(max(scaling.factor, 1)) / math.log(length))
    if scaling.mscale and scaling.mscale_all_dim:
        by_mscale = yarn_factor(scaling.factor, scaling.mscale)
        return by_mscale / yarn_factor(scaling.factor, scaling.mscale_all_dim)
    return yarn_factor(scaling.factor)


def rotation(config: RotaryConfig, positions: jax.Array) -> Rotation:
    """Return the angles of positions (B, T)."""
    angles = positions[..., None].astype(jnp.float32) * frequencies(config)
    factor = attention_factor(config)
    if factor == 1:
        return Rotation(jnp.cos(angles), jnp.sin(angles))
    return Rotation(jnp.cos(angles) * factor, jnp.sin(angles) * factor)


def rotations(configs: Sequence[RotaryConfig | None], positions: jax.Array) -> tuple[Rotation, ...]:
    """Return the angles of positions (B, T) in each of a model's ways; no way at all: nothing.

    Where some layers have no rotary positions and others have, theirs are all turned by 0.
    """
    first = next((config for config in configs if config is not None), None)
    if first is None:
        return ()
    nowhere = jnp.zeros_like(positions)
    unturned = RotaryConfig(first.num_dims)
    return tuple(
        rotation(unturned, nowhere) if config is None else rotation(config, positions)
        for config in configs
    )


def choose_rotation(rotations: tuple[Rotation, ...], number: jax.Array | None) -> Rotation | None:
    """Return the angles of the layer that has those of this number; None: all have the same."""
    if not rotations:
        return None
    chosen, *others = rotations
    for other_number, other in enumerate(others, start=1):
        is_other = number == other_number
        cos = jnp.where(is_other, other.cos, chosen.cos)
        chosen = Rotation(cos, jnp.where(is_other, other.sin, chosen.sin))
    return chosen


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
