"""What the common blocks are made of: norm, attention, rotary positions, feed-forward, experts.

Frozen and hashable, so that a compiled function can depend on them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

ACTIVATIONS = ("relu", "gelu", "gelu_new", "silu")
DTYPES = ("float32", "bfloat16")
REMAT_POLICIES = ("none", "full", "dots")
ROPE_TYPES = ("linear", "llama3")
# Other names of transformers for the same functions.
_SAME_ACTIVATION = {
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_new",
    "gelu_fast": "gelu_new",
    "gelu_python": "gelu",
}

NormKind = Literal["layer", "rms", "rms_offset"]


def activation_name(name: str) -> str:
    """Return which of ACTIVATIONS transformers means by `name`.

    Raises:
        ValueError: none of them.
    """
    known = _SAME_ACTIVATION.get(name, name)
    if known not in ACTIVATIONS:
        allowed = ", ".join((*ACTIVATIONS, *_SAME_ACTIVATION))
        raise ValueError(f"activation {name!r} is not known; it must be one of {allowed}.")
    return known


@dataclass(frozen=True)
class NormConfig:
    """A norm over the last dim.

    `layer`: mean and variance, scale and bias. `rms`: root mean square, scale.
    `rms_offset`: the same, but the stored scale is what is added to 1. Scales begin at
    `initial_scale`, those of `rms_offset` at 0.
    """

    kind: NormKind
    epsilon: float
    initial_scale: float = 1.0


@dataclass(frozen=True)
class AttentionConfig:
    """Attention of grouped queries; as many key-value heads as heads is the plain kind.

    Attributes:
        scale: what scores are multiplied by.
        cap: scores are squeezed into (-cap, cap) by tanh.
        is_cross: keys and values are those of another sequence, so their kernel is apart.
        norm_epsilon: of root-mean-square norms on each head's queries and keys; None: no norms.
        dropout: of the attention weights.
        query_init: factor of the initial stddev of queries.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    is_causal: bool = True
    is_cross: bool = False
    has_input_bias: bool = False
    has_output_bias: bool = False
    norm_epsilon: float | None = None
    cap: float | None = None
    dropout: float = 0.0
    query_init: float = 1.0

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"there are {self.num_kv_heads} key-value heads; they must divide the "
                f"{self.num_heads} heads."
            )

    @property
    def is_fused(self) -> bool:
        """Whether queries, keys and values are one kernel."""
        return self.num_heads == self.num_kv_heads and not self.is_cross


@dataclass(frozen=True)
class MlpConfig:
    """The position-wise layer; gated: the activation of one product times another."""

    mlp_dim: int
    activation: str
    is_gated: bool = False
    has_bias: bool = False
    dropout: float = 0.0


@dataclass(frozen=True)
class MixtureConfig:
    """Gated feed-forward experts, of which a router picks some for each token."""

    num_experts: int
    experts_per_token: int
    mlp_dim: int
    activation: str


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the length of pretraining.

    The names are those of Hugging Face's `rope_scaling`. `linear`: all by `factor`. `llama3`:
    long wavelengths by `factor`, short ones not, those between gradually.
    """

    rope_type: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    @classmethod
    def from_json(cls, value: Any) -> RopeScaling:
        """Read what a config says of it.

        Raises:
            ValueError: no mapping, or one with other keys or values.
        """
        if isinstance(value, cls):
            return value
        known = [field.name for field in dataclasses.fields(cls)]
        if not isinstance(value, Mapping) or not {"rope_type", "factor"} <= {*value} <= {*known}:
            raise ValueError(
                f"rope_scaling is {value!r}; it must be none or a mapping with rope_type and "
                f"factor. Known keys: {', '.join(known)}."
            )
        return cls(**value)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self)[1:]:
            number = getattr(self, field.name)
            if type(number) not in (int, float) or not 0 < number < math.inf:
                raise ValueError(
                    f"rope_scaling has {field.name} {number!r}; it must be a number above 0."
                )
        if self.rope_type not in ROPE_TYPES:
            allowed = ", ".join(ROPE_TYPES)
            raise ValueError(
                f"rope_scaling has rope_type {self.rope_type!r}; it must be one of {allowed}, "
                "or rope_scaling none for unscaled positions."
            )


@dataclass(frozen=True)
class RelativeConfig:
    """A learned bias of the scores for each head and bucket of distances, shared by all layers."""

    num_buckets: int
    max_distance: int


@dataclass(frozen=True)
class RotaryConfig:
    """Rotary positions on the first `num_dims` of each head.

    `is_interleaved`: rotated pairs are neighbours (GPT-J); otherwise halves apart.
    """

    num_dims: int
    theta: float = 10_000.0
    is_interleaved: bool = False
    scaling: RopeScaling | None = None
